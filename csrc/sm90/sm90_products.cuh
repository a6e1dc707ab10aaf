/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two products of a stage, S = Q K^T and O^T = V^T P^T.
 *
 * Both are issued ahead as far as registers go: a product takes over 100 clocks from its start to
 * its wait, whatever its size.
 */
#ifndef KBMLA_SM90_PRODUCTS_CUH
#define KBMLA_SM90_PRODUCTS_CUH

#include "sm90_tile.cuh"

/* Four panels of 128 channels, and the rope. wgmma cuts off what is 2^13 below the largest exponent
 * of a sum, so each panel is summed apart, at a third of the error of one sum over all. */
enum { SCORE_PANELS = 5 };

/* Starts s = Q K^T over one panel: 64 rows against the 64 tokens of a stage. */
template <int N>
static __device__ __forceinline__ void start_panel_scores(float (&s)[STAGE_TOKENS / 2], int panel,
                                                          uint32_t stage, uint32_t q) {
    const uint64_t k_panel = panel < 4 ? moved(panel_descriptor(stage), panel * PANEL_BYTES)
                                       : moved(rope_descriptor(stage), LATENT_BYTES);
    const uint64_t q_panel = panel < 4
                                 ? moved(panel_descriptor(q), panel * sm90_smem<N>::Q_PANEL_BYTES)
                                 : moved(rope_descriptor(q), 4 * sm90_smem<N>::Q_PANEL_BYTES);
    hold_registers(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < (panel < 4 ? 4 : 2); step++)
        wgmma_e4m3_64(s, moved(q_panel, 32 * step), moved(k_panel, 32 * step), step != 0);
    wgmma_commit();
}

/* Where a lane reads V, from a warpgroup's first panel on. */
static __device__ __forceinline__ uint32_t values_offset(uint32_t warp, uint32_t lane) {
    return lane * 128 + (((warp ^ lane) & 7) << 4);
}

/* The bytes of V^T of m tile `m` (64 columns) and the 64 tokens of a stage, 32 tokens a step;
 * `columns` is where the lane reads. ldmatrix takes the two bytes of neighbouring columns as one
 * unit. */
static __device__ __forceinline__ void load_values(uint32_t (&a)[2][4], uint32_t columns, int m) {
#pragma unroll
    for (int step = 0; step < 2; step++)
        ldmatrix_x4_trans(a[step],
                          (columns ^ (m & 1 ? 64 : 0)) + (m >> 1) * PANEL_BYTES + step * 32 * 128);
}

/* Makes A fragments of them: what there is of tokens 0-7 and 8-15 is sorted by column, so that rows
 * g and g + 8 of the fragment are columns 2g and 2g + 1. */
static __device__ __forceinline__ void sort_values(uint32_t (&a)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t low = a[step][i], high = a[step][i + 1];
            a[step][i] = __byte_perm(low, high, 0x6240);
            a[step][i + 1] = __byte_perm(low, high, 0x7351);
        }
}

/* Starts t = V^T P^T of one m tile over the tokens of a stage, for ROWS rows from P's row at `p`
 * on. */
template <int ROWS>
static __device__ __forceinline__ void start_output(float (&t)[ROWS / 2], uint32_t (&a)[2][4],
                                                    uint32_t p) {
    const uint64_t weights = panel_descriptor(p);
    hold_registers(t);
    hold_fragments(a);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; step++)
        wgmma_e4m3<ROWS>::rs(t, a[step], moved(weights, 32 * step), step != 0);
    wgmma_commit();
}

/* s = Q K^T. */
template <int N>
static __device__ __forceinline__ void compute_scores(float (&s)[STAGE_TOKENS / 2], uint32_t stage,
                                                      uint32_t q) {
    constexpr int AHEAD = sm90_smem<N>::PANELS_AHEAD;
    float next[AHEAD][STAGE_TOKENS / 2];
    start_panel_scores<N>(s, 0, stage, q);
#pragma unroll
    for (int panel = 1; panel <= AHEAD; panel++)
        start_panel_scores<N>(next[panel - 1], panel, stage, q);
#pragma unroll
    for (int panel = 1; panel < SCORE_PANELS; panel++) {
        float (&sum)[STAGE_TOKENS / 2] = next[(panel - 1) % AHEAD];
        if (AHEAD > 1 && panel + 1 < SCORE_PANELS)
            wgmma_wait<AHEAD - 1>();
        else
            wgmma_wait<0>();
        hold_registers(s);
        hold_registers(sum);
#pragma unroll
        for (int i = 0; i < STAGE_TOKENS / 2; i++)
            s[i] += sum[i];
        if (panel + AHEAD < SCORE_PANELS)
            start_panel_scores<N>(sum, panel + AHEAD, stage, q);
    }
}

/* What a stage adds to O. */
struct weighted_stage {
    uint32_t columns; /* where the lane reads in the first panel of its columns of V */
    uint32_t p;       /* P of the stage */
    uint32_t rescale; /* of what was summed before: the lane's first row */
};

/*
 * O = O * rescale + V^T P^T of a stage. A group is the products of an m tile, or of a part of its
 * rows; two run while the one before them is added. The factors stay in registers: reading them
 * for each m tile would take as much of shared memory's time as V.
 */
template <int N>
static __device__ __forceinline__ void accumulate(float (&o)[M_TILES][N / 2],
                                                  const weighted_stage &from) {
    constexpr int PARTS = sm90_smem<N>::PRODUCT_PARTS, ROWS = N / PARTS, GROUPS = M_TILES * PARTS,
                  COUNT = PARTS == 1 ? 3 : 2; /* m tiles' fragments: those in use, and the next */
    uint32_t a[COUNT][2][4];
    float t[3][ROWS / 2], factor[N / 4];
#pragma unroll
    for (int m = 0; m < COUNT; m++)
        load_values(a[m], from.columns, m);
#pragma unroll
    for (int i = 0; i < GROUPS + 2; i++) {
        const int m = i / PARTS, part = i % PARTS;
        if (i < GROUPS) {
            if (part == 0)
                sort_values(a[m % COUNT]);
            start_output<ROWS>(t[i % 3], a[m % COUNT], from.p + part * ROWS * 128);
        }
        if (i == 0) {
#pragma unroll
            for (int pair = 0; pair < N / 8; pair++) {
                const float2 both = load_shared_f32x2(from.rescale + 8 * pair);
                factor[2 * pair] = both.x;
                factor[2 * pair + 1] = both.y;
            }
        }
        if (i < 2)
            continue;
        if (i < GROUPS)
            wgmma_wait<2>();
        else if (i == GROUPS)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
        /* The group two before was the last of its m tile: its fragments make room. */
        if ((i - 2) % PARTS == PARTS - 1 && (i - 2) / PARTS + COUNT < M_TILES)
            load_values(a[(i - 2) / PARTS % COUNT], from.columns, (i - 2) / PARTS + COUNT);
        float (&sum)[N / 2] = o[(i - 2) / PARTS];
        float (&add)[ROWS / 2] = t[(i - 2) % 3];
        const int first = (i - 2) % PARTS * (ROWS / 8);
        hold_registers(add);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                sum[4 * (first + j) + k] = fmaf(sum[4 * (first + j) + k],
                                                factor[2 * (first + j) + (k & 1)], add[4 * j + k]);
    }
}

#endif
