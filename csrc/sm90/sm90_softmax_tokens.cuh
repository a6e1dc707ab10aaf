/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The softmax step of the SM90 decode for blocks of less than 64 rows, whose scores have tokens as
 * their M side: s[4j + 2h + c] of a lane is token 16 * warp + g + 8h of the stage, row 8j + 2t + c,
 * with g = lane / 4, t = lane % 4. So all warps have scores of every row. Maxima go through shared
 * memory; what is known of a row as a whole is with lane row % 32, the same in each warp.
 */
#ifndef KBMLA_SM90_SOFTMAX_TOKENS_CUH
#define KBMLA_SM90_SOFTMAX_TOKENS_CUH

#include "sm90_softmax.cuh"

/* The row of number i = 2j + c of a lane's N / 4. */
static __device__ __forceinline__ uint32_t lane_row(int i, uint32_t lane) {
    return 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
}

/* -inf for tokens that a row does not see; `visible` is of row 0, `token` the warp's first. */
template <int N>
static __device__ __forceinline__ void mask_token_scores(float (&s)[N / 2], uint32_t visible,
                                                         uint32_t token, uint32_t lane) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint32_t bound = load_shared_u32(visible + 4 * lane_row(i, lane));
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (token + (lane >> 2) + 8 * h >= bound)
                s[4 * (i >> 1) + 2 * h + (i & 1)] = -INFINITY;
    }
}

/*
 * The largest of the warp's scores of each row, to the warp's place of row 0 at `to`. A row has
 * CONSUMER_WARPS places. A reduce-scatter over the eight lanes of equal t: the two lanes of a pair
 * share out their rows, each sending the half that the other keeps. An odd number is not shared
 * out: both keep all, and one of them stores.
 */
template <int N>
static __device__ __forceinline__ void share_token_maxima(const float (&s)[N / 2], uint32_t to,
                                                          uint32_t lane) {
    float top[N / 8]; /* of rows 8j + 2t + c, where c is bit 4 of the lane */
    const bool is_odd = (lane & 16) != 0;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float even = fmaxf(s[4 * j], s[4 * j + 2]), odd = fmaxf(s[4 * j + 1], s[4 * j + 3]);
        const float other = __shfl_xor_sync(FULL_WARP, is_odd ? even : odd, 16);
        top[j] = fmaxf(is_odd ? odd : even, other);
    }
    int count = N / 8;
    uint32_t row = 2 * (lane & 3) + is_odd;
    bool is_first = true; /* of lanes that have the same */
#pragma unroll
    for (int bit = 8; bit >= 4; bit /= 2) {
        const bool is_high = (lane & bit) != 0;
        if (count % 2 == 0) {
            count /= 2;
            row += is_high ? 8 * count : 0;
#pragma unroll
            for (int j = 0; j < count; j++) {
                const float low = top[j], high = top[j + count];
                const float other = __shfl_xor_sync(FULL_WARP, is_high ? low : high, bit);
                top[j] = fmaxf(is_high ? high : low, other);
            }
        } else {
            is_first = is_first && !is_high;
#pragma unroll
            for (int j = 0; j < count; j++)
                top[j] = fmaxf(top[j], __shfl_xor_sync(FULL_WARP, top[j], bit));
        }
    }
#pragma unroll
    for (int j = 0; j < count; j++)
        store_shared_f32_if(is_first, to + (row + 8 * j) * (CONSUMER_WARPS * 4), top[j]);
}

/* The largest of a row's places at `at`. */
static __device__ __forceinline__ float largest_part(uint32_t at) {
    const uint4 a = load_shared_16(at), b = load_shared_16(at + 16);
    const float x = fmaxf(fmaxf(__uint_as_float(a.x), __uint_as_float(a.y)),
                          fmaxf(__uint_as_float(a.z), __uint_as_float(a.w)));
    return fmaxf(x, fmaxf(fmaxf(__uint_as_float(b.x), __uint_as_float(b.y)),
                          fmaxf(__uint_as_float(b.z), __uint_as_float(b.w))));
}

/* Where a lane's row begins in P's first matrices, of 8 rows and the warp's 16 tokens each: two of
 * 16 rows, else four. Rows from 32 on are in two or four more, 32 rows further on. */
template <int N>
static __device__ __forceinline__ uint32_t token_p_offset(uint32_t block_warp, uint32_t lane) {
    const uint32_t row = lane & (N <= 16 ? 15 : 31);
    return row * 128 + (((block_warp ^ row) & 7) << 4);
}

/* As exponentiate_rows(), of the warp's 16 tokens; but `fresh` becomes the sums of the tile alone.
 * `kept` is of rows lane, lane + 32. */
template <int N>
static __device__ __forceinline__ void
exponentiate_tokens(const float (&s)[N / 2], float (&fresh)[N / 4],
                    const float (&kept)[sm90_smem<N>::LANE_ROWS], float scale, float log2_p_scale,
                    uint32_t p, uint32_t lane) {
    uint32_t packed[8] = {};
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int i = 2 * j + c;
            const float top = __shfl_sync(FULL_WARP, kept[j / 4], lane_row(i, lane) & 31);
            const float p0 = exp2_approx(fmaf(s[4 * j + c] - top, scale, log2_p_scale));
            const float p8 = exp2_approx(fmaf(s[4 * j + 2 + c] - top, scale, log2_p_scale));
            fresh[i] = p0 + p8;
            packed[j] |= round_p(p0, p8) << (16 * c);
        }
    if constexpr (N <= 16)
        stmatrix_x2_trans(p, packed[0], packed[1]);
    else
        stmatrix_x4_trans(p, packed[0], packed[1], packed[2], packed[3]);
    if constexpr (N > 48)
        stmatrix_x4_trans(p + 32 * 128, packed[4], packed[5], packed[6], packed[7]);
    else if constexpr (N > 32)
        stmatrix_x2_trans(p + 32 * 128, packed[4], packed[5]);
}

/* Sums over the warp's tokens, to row_sum, [N]. */
template <int N>
static __device__ __forceinline__ void share_token_sums(float (&sums)[N / 4], float *row_sum,
                                                        uint32_t lane) {
#pragma unroll
    for (int bit = 4; bit <= 16; bit *= 2)
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], bit);
    if (lane < 4)
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            row_sum[lane_row(i, lane)] = sums[i];
}

#endif
