/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The softmax step of the SM90 decode for blocks of 64 rows, whose scores have rows as their M
 * side: s[4j + 2h + c] of a lane is row 16 * warp + g + 8h, token 8j + 2t + c of the stage, with
 * g = lane / 4, t = lane % 4. So a lane has 16 scores of each of two rows, and the four lanes of
 * equal g have all 64.
 */
#ifndef KBMLA_SM90_SOFTMAX_ROWS_CUH
#define KBMLA_SM90_SOFTMAX_ROWS_CUH

#include "sm90_softmax.cuh"

/* -inf for tokens that a row does not see; `visible` is of the lane's first row, `token` the
 * stage's first. */
static __device__ __forceinline__ void
mask_row_scores(float (&s)[STAGE_TOKENS / 2], uint32_t visible, uint32_t token, uint32_t lane) {
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

/* The largest of each row's scores, in all four of its lanes. */
static __device__ __forceinline__ void row_maxima(float (&top)[2],
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
static __device__ __forceinline__ void sum_row_lanes(float (&sums)[2]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++)
            sums[h] += __shfl_xor_sync(FULL_WARP, sums[h], bit);
}

/* Where a lane writes its first 16 bytes of P, in a tile of P: row i % 8 of matrix i / 8, of which
 * two are of rows and two of 16 tokens each. A stage has half of the tile's bytes of a row. */
static __device__ __forceinline__ uint32_t row_p_offset(uint32_t group, uint32_t warp,
                                                        uint32_t lane) {
    const uint32_t row = 16 * warp + (lane & 15), chunk = 4 * group + (lane >> 4);
    return row * 128 + (((chunk ^ row) & 7) << 4);
}

/*
 * P of the warp's 16 rows, as E4M3 of 2^log2_p_scale * exp2((s - maximum) * scale), to `p`, the
 * lane's place in the stage's P; sums of the unrounded values, with the same factor, into `sums`.
 * The difference first: it is exact near the maximum, where scaled scores of 1e7 would be rounded
 * by whole per cents of P.
 */
static __device__ __forceinline__ void exponentiate_rows(const float (&s)[STAGE_TOKENS / 2],
                                                         float (&sums)[2], const float (&maxima)[2],
                                                         float scale, float log2_p_scale,
                                                         uint32_t p) {
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
