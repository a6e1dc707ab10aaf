/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The softmax step of the SM90 decode on scores as wgmma leaves them: s[4j + 2h + c] of a lane is
 * row 16 * warp + g + 8h, token 8j + 2t + c of the stage, with g = lane / 4, t = lane % 4. So a
 * lane has 16 scores of each of two rows, and the four lanes of equal g have all 64.
 *
 * A row's maximum over the 128 tokens of a tile, two stages, is exact. It is kept while it grows by
 * at most 8 - log2(p_scale), as on every backend.
 */
#ifndef KBMLA_SM90_SOFTMAX_CUH
#define KBMLA_SM90_SOFTMAX_CUH

#include "sm90_tile.cuh"

/* Stands for "no key seen": finite, so that differences with -inf are not NaN. */
#define NO_MAXIMUM (-3.4028234e38f)

/*
 * wgmma cuts off towards zero, so O comes out too small on average. Over a tile it loses 2.4e-4 to
 * 2.8e-4 of the mean of a column of V where that is up to a quarter of the deviation, 7e-4 where it
 * equals it, 1e-3 where it is several times that (emulated; benchmarks/NOTES.md). P is rounded as
 * if it were larger by the least of these, which makes up for it on average. A P that E4M3 holds
 * stays the same, and so does the sum of P.
 */
#define LEAST_CUT 2.4e-4f

/* P of tokens i and i + 8 as O is summed from it. */
static __device__ __forceinline__ uint32_t round_p(float p0, float p8) {
    return pack_e4m3x2(p0 * (1.0f + LEAST_CUT), p8 * (1.0f + LEAST_CUT));
}

/* -inf for tokens that a row does not see; `visible` is of the lane's first row, `token` the
 * stage's first. */
static __device__ __forceinline__ void mask_scores(float (&s)[STAGE_TOKENS / 2], uint32_t visible,
                                                   uint32_t token, uint32_t lane) {
    const uint32_t first = token + 2 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t bound = load_shared_u32(visible + 32 * h);
#pragma unroll
        for (int j = 0; j < STAGE_TOKENS / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (first + 8 * j + c >= bound)
                    s[4 * j + 2 * h + c] = -INFINITY;
    }
}

/* Zeros in place of the value bytes past `end` among the 16 tokens of this warp, which may be
 * anything: P is 0 there, but 0 * NaN is not. Scores may still be computed from them elsewhere, and
 * are masked. `token` is the stage's first. */
static __device__ __forceinline__ void clear_values(uint32_t stage, uint32_t token, uint32_t end,
                                                    uint32_t warp, uint32_t lane) {
    const uint32_t first = 16 * warp;
#pragma unroll 1
    for (uint32_t row = first; row < first + 16; row++)
        if (token + row >= end)
            store_shared_16(stage + (lane >> 3) * PANEL_BYTES + row * 128 + (lane & 7) * 16, 0);
}

/* The maximum that a row goes on with. */
static __device__ __forceinline__ float grown_maximum(float kept, float seen, float scale,
                                                      float growth) {
    const bool is_first = kept == NO_MAXIMUM;
    return seen > kept && (is_first || (seen - kept) * scale > growth) ? seen : kept;
}

/* The largest of each row's scores, in all four of its lanes. */
static __device__ __forceinline__ void stage_maxima(float (&top)[2],
                                                    const float (&s)[STAGE_TOKENS / 2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float x[STAGE_TOKENS / 8];
#pragma unroll
        for (int j = 0; j < STAGE_TOKENS / 8; j++)
            x[j] = fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        top[h] = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])),
                       fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++)
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], bit));
}

/* The sums of each row's four lanes, in all of them. */
static __device__ __forceinline__ void sum_of_lanes(float (&sums)[2]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++)
            sums[h] += __shfl_xor_sync(FULL_WARP, sums[h], bit);
}

/* Where a lane writes its first 16 bytes of P, in a tile of P: row i % 8 of matrix i / 8, of which
 * two are of rows and two of 16 tokens each. A stage has half of the tile's bytes of a row. */
static __device__ __forceinline__ uint32_t p_offset(uint32_t group, uint32_t warp, uint32_t lane) {
    const uint32_t row = 16 * warp + (lane & 15), chunk = 4 * group + (lane >> 4);
    return row * 128 + (((chunk ^ row) & 7) << 4);
}

/*
 * P of the warp's 16 rows, as E4M3 of 2^log2_p_scale * exp2((s - maximum) * scale), to `p`, the
 * lane's place in the stage's P; sums of the unrounded values, with the same factor, into `sums`.
 * The difference first: it is exact near the maximum, where scaled scores of 1e7 would be rounded
 * by whole per cents of P.
 */
static __device__ __forceinline__ void exponentiate(const float (&s)[STAGE_TOKENS / 2],
                                                    float (&sums)[2], const float (&maxima)[2],
                                                    float scale, float log2_p_scale, uint32_t p) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        uint32_t packed[2][2]; /* 16 tokens, half of the rows */
#pragma unroll
        for (int piece = 0; piece < 2; piece++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = 8 * (2 * pair + piece) + 2 * h;
                const float top = maxima[h];
                const float p0 = exp2_approx(fmaf(s[at] - top, scale, log2_p_scale));
                const float p1 = exp2_approx(fmaf(s[at + 1] - top, scale, log2_p_scale));
                const float p8 = exp2_approx(fmaf(s[at + 4] - top, scale, log2_p_scale));
                const float p9 = exp2_approx(fmaf(s[at + 5] - top, scale, log2_p_scale));
                sums[h] += (p0 + p1) + (p8 + p9);
                packed[piece][h] = round_p(p0, p8) | round_p(p1, p9) << 16;
            }
        stmatrix_x4(p ^ (32 * pair), packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
    }
}

#endif
