/*
 * The two products of a tile, S^T = K Q^T and O^T = V^T P^T, and how they follow each other.
 *
 * Up to 48 rows there are registers enough to compute the scores of the next tile in between: panel
 * by panel, each started before the wait for an m tile of O, so that the tensor cores have work
 * while the warps load fragments and add.
 */
#ifndef KBMLA_SM90_PRODUCTS_CUH
#define KBMLA_SM90_PRODUCTS_CUH

#include "sm90_tile.cuh"

/* Four panels of 128 channels, and the rope. wgmma cuts off what is 2^13 below the largest exponent
 * of a sum, so each panel is summed apart, at a third of the error of one sum over all. */
enum { SCORE_PANELS = 5 };

/* Starts s = K Q^T over one panel: the 64 tokens of a stage against all rows. */
template <int N>
static __device__ __forceinline__ void start_panel_scores(float (&s)[N / 2], int panel,
                                                          uint32_t stage, uint32_t q) {
    const uint64_t k_panel = panel < 4 ? panel_descriptor(stage + panel * PANEL_BYTES)
                                       : rope_descriptor(stage + LATENT_BYTES);
    const uint64_t q_panel = panel < 4 ? panel_descriptor(q + panel * sm90_smem<N>::Q_PANEL_BYTES)
                                       : rope_descriptor(q + 4 * sm90_smem<N>::Q_PANEL_BYTES);
    hold_registers(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < (panel < 4 ? 4 : 2); step++)
        wgmma_e4m3<N>::ss(s, k_panel + 2 * step, q_panel + 2 * step, step != 0);
    wgmma_commit();
}

/*
 * V^T of m tile `m` (64 columns) and all 128 tokens as A fragments, 32 tokens a step. ldmatrix
 * takes the two bytes of neighbouring columns as one unit; what it gives of tokens 0-7 and 8-15 is
 * sorted by column, so rows g and g + 8 of the fragment are columns 2g and 2g + 1. `latent` are the
 * first panels of the warpgroup's columns in the two stages.
 */
static __device__ __forceinline__ void load_values(uint32_t (&a)[4][4], const uint32_t (&latent)[2],
                                                   int m, uint32_t warp, uint32_t lane) {
    const uint32_t at = lane * 128 + (((warp ^ lane) & 7) << 4);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, latent[step >> 1] + (m >> 1) * PANEL_BYTES + (step & 1) * 32 * 128 +
                                 (at ^ (m & 1 ? 64 : 0)));
        a[step][0] = __byte_perm(x[0], x[1], 0x6240);
        a[step][1] = __byte_perm(x[0], x[1], 0x7351);
        a[step][2] = __byte_perm(x[2], x[3], 0x6240);
        a[step][3] = __byte_perm(x[2], x[3], 0x7351);
    }
}

/* Starts t = V^T P^T of one m tile over 128 tokens. */
template <int N>
static __device__ __forceinline__ void start_output(float (&t)[N / 2], const uint32_t (&a)[4][4],
                                                    uint32_t p) {
    const uint64_t rows = panel_descriptor(p);
    hold_registers(t);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_e4m3<N>::rs(t, a[step], rows + 2 * step, step != 0);
    wgmma_commit();
}

/* s = K Q^T. */
template <int N>
static __device__ __forceinline__ void compute_scores(float (&s)[N / 2], uint32_t stage,
                                                      uint32_t q) {
    float next[N / 2];
    start_panel_scores<N>(s, 0, stage, q);
#pragma unroll
    for (int panel = 1; panel < SCORE_PANELS; panel++) {
        start_panel_scores<N>(next, panel, stage, q);
        wgmma_wait<0>();
        hold_registers(s);
        hold_registers(next);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            s[i] += next[i];
    }
}

/* o = o * rescale + t for one m tile. */
template <int N>
static __device__ __forceinline__ void add_output(float (&o)[N / 2], float (&t)[N / 2],
                                                  const float *rescale, uint32_t lane) {
    hold_registers(t);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 factor =
            *reinterpret_cast<const float2 *>(&rescale[(lane & 3) * sm90_smem<N>::PITCH + 2 * j]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            o[4 * j + i] = fmaf(o[4 * j + i], i & 1 ? factor.y : factor.x, t[4 * j + i]);
    }
}

/* O = O * rescale + V^T P^T of a tile. */
template <int N>
static __device__ __forceinline__ void
accumulate(float (&o)[M_TILES][N / 2], const uint32_t (&latent)[2], uint32_t p,
           const float *rescale, uint32_t warp, uint32_t lane) {
    uint32_t a[2][4][4];
    load_values(a[0], latent, 0, warp, lane);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float t[N / 2];
        start_output<N>(t, a[m & 1], p);
        if (m + 1 < M_TILES)
            load_values(a[(m + 1) & 1], latent, m + 1, warp, lane);
        wgmma_wait<0>();
        add_output<N>(o[m], t, rescale, lane);
    }
}

/* The same, and s = K Q^T of the next tile. */
template <int N>
static __device__ __forceinline__ void
accumulate_and_score(float (&o)[M_TILES][N / 2], float (&s)[N / 2], const uint32_t (&latent)[2],
                     uint32_t p, const float *rescale, uint32_t next_stage, uint32_t q,
                     uint32_t warp, uint32_t lane) {
    static_assert(SCORE_PANELS == M_TILES + 1, "one panel ahead, then one per m tile");
    uint32_t a[4][4];
    start_panel_scores<N>(s, 0, next_stage, q);
    load_values(a, latent, 0, warp, lane);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        float t[N / 2], next[N / 2];
        start_output<N>(t, a, p);
        start_panel_scores<N>(next, m + 1, next_stage, q);
        wgmma_wait<1>();
        hold_registers(s);
        if (m + 1 < M_TILES)
            load_values(a, latent, m + 1, warp, lane);
        add_output<N>(o[m], t, rescale, lane);
        wgmma_wait<0>();
        hold_registers(next);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            s[i] += next[i];
    }
}

#endif
