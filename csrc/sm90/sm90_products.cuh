/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scores of a stage, and O^T = V^T P^T of a tile.
 *
 * A product takes over 100 clocks from its start to its wait, whatever its size. Panels of scores
 * are issued ahead as far as registers go; between m tiles of O the other warpgroup's products run.
 */
#ifndef KBMLA_SM90_PRODUCTS_CUH
#define KBMLA_SM90_PRODUCTS_CUH

#include "sm90_tile.cuh"

/* Four panels of 128 channels, and the rope. wgmma cuts off what is 2^13 below the largest exponent
 * of a sum, so each panel is summed apart, at a third of the error of one sum over all. */
enum { SCORE_PANELS = 5 };

/* Starts the scores of one panel of channels: K Q^T of the 64 tokens of a stage and N rows, or
 * where rows are the M side Q K^T. */
template <int N>
static __device__ __forceinline__ void start_panel_scores(float (&s)[N / 2], int panel,
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
        if constexpr (sm90_smem<N>::TOKENS_ARE_M)
            wgmma_e4m3<N>::ss(s, moved(k_panel, 32 * step), moved(q_panel, 32 * step), step != 0);
        else
            wgmma_e4m3<STAGE_TOKENS>::ss(s, moved(q_panel, 32 * step), moved(k_panel, 32 * step),
                                         step != 0);
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

/* Starts t (+)= V^T P^T of one m tile and a stage, whose P begins at `p`. */
template <int N>
static __device__ __forceinline__ void start_output(float (&t)[N / 2], uint32_t (&a)[2][4],
                                                    uint32_t p, bool is_sum) {
    const uint64_t weights = panel_descriptor(p);
    hold_registers(t);
    hold_fragments(a);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; step++)
        wgmma_e4m3<N>::rs(t, a[step], moved(weights, 32 * step), is_sum || step != 0);
    wgmma_commit();
}

/* Scores of a stage: N / 2 of a thread, whichever the M side is. */
template <int N>
static __device__ __forceinline__ void compute_scores(float (&s)[N / 2], uint32_t stage,
                                                      uint32_t q) {
    constexpr int AHEAD = sm90_smem<N>::PANELS_AHEAD;
    float next[AHEAD][N / 2];
    start_panel_scores<N>(s, 0, stage, q);
#pragma unroll
    for (int panel = 1; panel <= AHEAD; panel++)
        start_panel_scores<N>(next[panel - 1], panel, stage, q);
#pragma unroll
    for (int panel = 1; panel < SCORE_PANELS; panel++) {
        float (&sum)[N / 2] = next[(panel - 1) % AHEAD];
        if (AHEAD == 2 && panel + 1 < SCORE_PANELS)
            wgmma_wait<1>();
        else if (AHEAD < SCORE_PANELS - 1 || panel == 1)
            wgmma_wait<0>();
        hold_registers(s);
        hold_registers(sum);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            s[i] += sum[i];
        if (panel + AHEAD < SCORE_PANELS)
            start_panel_scores<N>(sum, panel + AHEAD, stage, q);
    }
}

/* A tile as accumulate() takes it: addresses in shared memory. */
struct tile_places {
    uint32_t columns[2]; /* where the lane reads in the first panel of its columns of V, by stage */
    uint32_t p;
    uint32_t rescale;                   /* of what was summed before: the lane's first row */
    uint32_t empty_bar[2];              /* of the stages */
    uint32_t next_full_bar, next_phase; /* of the warpgroup's stage in the next tile */
};

/* Fragment number 2 * m + stage is V^T of an m tile and a stage, in slot number % FRAGMENTS until
 * its products are done. */
template <int N> using value_fragments = uint32_t[sm90_smem<N>::FRAGMENTS][2][4];

template <int N>
static __device__ __forceinline__ void load_fragment(value_fragments<N> &a, const tile_places &tile,
                                                     int number) {
    load_values(a[number % sm90_smem<N>::FRAGMENTS], tile.columns[number & 1], number >> 1);
}

template <int N>
static __device__ __forceinline__ void load_first_fragments(value_fragments<N> &a,
                                                            const tile_places &tile) {
#pragma unroll
    for (int number = 0; number < sm90_smem<N>::FRAGMENTS; number++)
        load_fragment<N>(a, tile, number);
}

/* The warp has read all that it reads of a tile's stages. */
static __device__ __forceinline__ void release_stages(const tile_places &tile) {
    __syncwarp();
    if (is_elected()) {
        mbarrier_arrive(tile.empty_bar[0]);
        mbarrier_arrive(tile.empty_bar[1]);
    }
}

/*
 * O = O * rescale + V^T P^T of a tile, whose first fragments are loaded; says whether the
 * warpgroup's next stage is there, which is asked beside the last products so that the answer costs
 * no time. The factors stay in registers: reading them for each m tile would take as much of shared
 * memory's time as V. Where tokens are the M side of scores they are also those of the lane's row
 * sums, so the tile's, `fresh`, are added here.
 */
template <int N>
static __device__ __forceinline__ bool accumulate(float (&o)[M_TILES][N / 2], row_state<N> &state,
                                                  value_fragments<N> &a, const tile_places &tile) {
    constexpr int FRAGMENTS = sm90_smem<N>::FRAGMENTS;
    static_assert(FRAGMENTS >= 2, "an m tile's fragments are loaded before its products start");
    float t[N / 2], factor[N / 4];
    bool is_next_there = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int stage = 0; stage < 2; stage++) {
            uint32_t (&values)[2][4] = a[(2 * m + stage) % FRAGMENTS];
            sort_values(values);
            start_output<N>(t, values, tile.p + stage * STAGE_TOKENS, stage != 0);
        }
        if (m == 0) {
#pragma unroll
            for (int pair = 0; pair < N / 8; pair++) {
                const float2 both = load_shared_f32x2(tile.rescale + 8 * pair);
                factor[2 * pair] = both.x;
                factor[2 * pair + 1] = both.y;
            }
            if constexpr (sm90_smem<N>::TOKENS_ARE_M)
#pragma unroll
                for (int i = 0; i < N / 4; i++)
                    state.sums[i] = fmaf(state.sums[i], factor[i], state.fresh[i]);
        }
        if (m == M_TILES - 1) {
            release_stages(tile);
            is_next_there =
                __all_sync(FULL_WARP, mbarrier_poll(tile.next_full_bar, tile.next_phase));
        }
        /* Products that are done make room for a fragment. */
#pragma unroll
        for (int stage = 0; stage < 2; stage++) {
            stage == 0 ? wgmma_wait<1>() : wgmma_wait<0>();
            const int number = 2 * m + stage + FRAGMENTS;
            if (number < 2 * M_TILES)
                load_fragment<N>(a, tile, number);
        }
        hold_registers(t);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            o[m][i] = fmaf(o[m][i], factor[2 * (i >> 2) + (i & 1)], t[i]);
    }
    return is_next_there;
}

#endif
