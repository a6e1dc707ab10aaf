/*
 * The softmax step of the SM90 decode on scores as wgmma leaves them: s[4j + 2h + c] of a lane is
 * token 16 * warp + g + 8h of the warpgroup's 64, row 8j + 2t + c, with g = lane / 4, t = lane % 4.
 *
 * A row's maximum over the 128 tokens of a tile is exact: lanes, then warps through shared memory.
 * It is kept while it grows by at most 8 - log2(p_scale), as on every backend. Each warp then holds
 * the same maxima; lane l decides for rows whose pair of values is pair l of the positions.
 */
#ifndef KBMLA_SM90_SOFTMAX_CUH
#define KBMLA_SM90_SOFTMAX_CUH

#include "sm90_tile.cuh"

/* Stands for "no key seen": finite, so that differences with -inf are not NaN. */
#define NO_MAXIMUM (-3.4028234e38f)

/* -inf for tokens that a row does not see; `token` is the stage's first. */
template <int N>
static __device__ __forceinline__ void mask_scores(float (&s)[N / 2], const int32_t *visible,
                                                   uint32_t token, uint32_t warp, uint32_t lane) {
    const uint32_t first = token + 16 * warp + (lane >> 2);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int2 bound = *reinterpret_cast<const int2 *>(&visible[8 * j + 2 * (lane & 3)]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &s0 = s[4 * j + 2 * h], &s1 = s[4 * j + 2 * h + 1];
            s0 = first + 8 * h < (uint32_t)bound.x ? s0 : -INFINITY;
            s1 = first + 8 * h < (uint32_t)bound.y ? s1 : -INFINITY;
        }
    }
}

/* Zeros in place of the value bytes past `end` among the 16 tokens of this warp, which may be
 * anything: P is 0 there, but 0 * NaN is not. `token` is the stage's first. */
static __device__ __forceinline__ void clear_values(uint32_t stage, uint32_t token, uint32_t end,
                                                    uint32_t warp, uint32_t lane) {
    const uint32_t first = 16 * warp;
#pragma unroll 1
    for (uint32_t row = first; row < first + 16; row++)
        if (token + row >= end)
            store_shared_16(stage + (lane >> 3) * PANEL_BYTES + row * 128 + (lane & 7) * 16, 0);
}

/* What is left to a lane after combine_lanes. */
struct lane_share {
    int32_t first;
    bool is_writer; /* where lanes hold the same values, one of them */
};

/* Combines the lanes of equal lane % 4 by halving: the values are shared out, so that the first
 * `count` of x are left to this lane, for the rows from index `first` on. */
template <int VALUES, typename Combine>
static __device__ __forceinline__ lane_share combine_lanes(float (&x)[VALUES], int &count,
                                                           uint32_t lane, Combine combine) {
    lane_share share = {0, true};
    count = VALUES;
#pragma unroll
    for (int bit = 4; bit <= 16; bit *= 2) {
        const bool is_upper = lane & bit;
        if (count % 2 == 0) {
            count /= 2;
#pragma unroll
            for (int i = 0; i < VALUES / 2; i++)
                if (i < count) {
                    const float kept = is_upper ? x[i + count] : x[i];
                    const float sent = is_upper ? x[i] : x[i + count];
                    x[i] = combine(kept, __shfl_xor_sync(FULL_WARP, sent, bit));
                }
            share.first += is_upper ? count : 0;
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                if (i < count)
                    x[i] = combine(x[i], __shfl_xor_sync(FULL_WARP, x[i], bit));
            share.is_writer = share.is_writer && !is_upper;
        }
    }
    return share;
}

struct take_max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct take_sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

/* Combines x over the warp's lanes and writes it by position, one value per row. */
template <int N, typename Combine>
static __device__ __forceinline__ void combine_rows(float (&x)[N / 4], float *by_position,
                                                    uint32_t lane, Combine combine) {
    int count;
    const lane_share share = combine_lanes(x, count, lane, combine);
    if (share.is_writer) {
        float *to = by_position + (lane & 3) * sm90_smem<N>::PITCH + share.first;
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            if (i < count)
                to[i] = x[i];
    }
}

template <int N>
static __device__ __forceinline__ void write_tile_maxima(const float (&s)[N / 2], float *tile_max,
                                                         uint32_t lane) {
    float x[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        x[i] = fmaxf(s[4 * (i >> 1) + (i & 1)], s[4 * (i >> 1) + 2 + (i & 1)]);
    combine_rows<N>(x, tile_max, lane, take_max());
}

/* The position of the pair of rows that a lane decides for; lanes past N / 2 have none. */
template <int N> static __device__ __forceinline__ uint32_t pair_position(uint32_t lane) {
    return lane / (N / 8) * sm90_smem<N>::PITCH + 2 * (lane % (N / 8));
}

/* This lane's two rows, combined over the warps in their order. */
template <int N, typename Combine>
static __device__ __forceinline__ float2
combine_warps(const float (&by_warp)[CONSUMER_WARPS][sm90_smem<N>::POSITIONS], uint32_t position,
              Combine combine) {
    float2 value = *reinterpret_cast<const float2 *>(&by_warp[0][position]);
#pragma unroll
    for (int w = 1; w < CONSUMER_WARPS; w++) {
        const float2 next = *reinterpret_cast<const float2 *>(&by_warp[w][position]);
        value.x = combine(value.x, next.x);
        value.y = combine(value.y, next.y);
    }
    return value;
}

/* The maximum that a row goes on with. */
static __device__ __forceinline__ float grown_maximum(float kept, float seen, float scale,
                                                      float growth) {
    const bool is_first = kept == NO_MAXIMUM;
    return seen > kept && (is_first || (seen - kept) * scale > growth) ? seen : kept;
}

template <int N>
static __device__ __forceinline__ void forget_maxima(float *row_max, uint32_t lane) {
    if (lane < N / 2)
        *reinterpret_cast<float2 *>(&row_max[pair_position<N>(lane)]) =
            make_float2(NO_MAXIMUM, NO_MAXIMUM);
}

/* Moves the warp's copy of the maxima on, and sets the factors of what was summed so far. */
template <int N>
static __device__ __forceinline__ void update_maxima(sm90_smem<N> &smem, float scale, float growth,
                                                     uint32_t consumer_warp, uint32_t lane) {
    if (lane < N / 2) {
        const uint32_t position = pair_position<N>(lane);
        float2 &own = *reinterpret_cast<float2 *>(&smem.row_max[consumer_warp][position]);
        const float2 kept = own;
        const float2 seen = combine_warps<N>(smem.tile_max, position, take_max());
        const float2 next = make_float2(grown_maximum(kept.x, seen.x, scale, growth),
                                        grown_maximum(kept.y, seen.y, scale, growth));
        own = next;
        *reinterpret_cast<float2 *>(&smem.rescale[consumer_warp][position]) = make_float2(
            exp2_approx((kept.x - next.x) * scale), exp2_approx((kept.y - next.y) * scale));
    }
    __syncwarp();
}

/*
 * P of the warp's 16 tokens, as E4M3 of 2^log2_p_scale * exp2((s - maximum) * scale), into its 16
 * bytes of every row of `p`; sums of the unrounded values, with the same factor, into `l`. The
 * difference first: it is exact near the maximum, where scaled scores of 1e7 would be rounded by
 * whole per cents of P.
 */
template <int N>
static __device__ __forceinline__ void
exponentiate(const float (&s)[N / 2], float (&l)[N / 4], const float *row_max, const float *rescale,
             float scale, float log2_p_scale, uint32_t p, uint32_t consumer_warp, uint32_t lane) {
    const uint32_t first = (lane & 3) * sm90_smem<N>::PITCH;
    uint32_t packed[N / 8];
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 top = *reinterpret_cast<const float2 *>(&row_max[first + 2 * j]);
        const float2 factor = *reinterpret_cast<const float2 *>(&rescale[first + 2 * j]);
        const float p00 = exp2_approx(fmaf(s[4 * j] - top.x, scale, log2_p_scale));
        const float p01 = exp2_approx(fmaf(s[4 * j + 1] - top.y, scale, log2_p_scale));
        const float p10 = exp2_approx(fmaf(s[4 * j + 2] - top.x, scale, log2_p_scale));
        const float p11 = exp2_approx(fmaf(s[4 * j + 3] - top.y, scale, log2_p_scale));
        l[2 * j] = fmaf(l[2 * j], factor.x, p00 + p10);
        l[2 * j + 1] = fmaf(l[2 * j + 1], factor.y, p01 + p11);
        packed[j] = pack_e4m3x2(p00, p10) | pack_e4m3x2(p01, p11) << 16;
    }
    /* Lane i gives the address of row i % 8 of matrix i / 8. */
    const uint32_t row = lane & 7, matrix = lane >> 3;
    const uint32_t to = p + row * 128 + (((consumer_warp ^ row) & 7) << 4);
#pragma unroll
    for (int j = 0; j + 4 <= N / 8; j += 4)
        stmatrix_x4_trans(to + (j + matrix) * 1024, packed[j], packed[j + 1], packed[j + 2],
                          packed[j + 3]);
    constexpr int rest = N / 8 / 4 * 4;
    if constexpr ((N / 8) & 2)
        stmatrix_x2_trans(to + (rest + (matrix & 1)) * 1024, packed[rest], packed[rest + 1]);
    if constexpr ((N / 8) & 1)
        stmatrix_x1_trans(to + (N / 8 - 1) * 1024, packed[N / 8 - 1]);
}

#endif
