/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What all blocks of the SM90 decode share of the softmax step; the rest of it is in
 * sm90_softmax_tokens.cuh for scores with tokens as their M side, in sm90_softmax_rows.cuh with
 * rows.
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

#endif
