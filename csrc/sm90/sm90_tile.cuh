/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sizes, layouts, shared memory and the registers that follow from them in the SM90 decode, for
 * blocks of N query rows: 16, 24, 32, 40, 48, 56 or 64.
 *
 * A stage of the ring holds 64 tokens as two operands of wgmma: the latent as four panels
 * [64 tokens, 128 B] in the 128-byte swizzle, the rope as one [64, 64 B] in the 64-byte swizzle.
 * Q lies the same way with its N rows in place of tokens. P is [N rows, 128 tokens] in the
 * 128-byte swizzle; within 16 tokens byte 2i is token i and byte 2i + 1 token i + 8, the order in
 * which transposed V fragments come out of ldmatrix.
 *
 * What O is multiplied by is kept by position: row 8j + 2t + c, of which a lane with lane % 4 = t
 * has columns of O, has position t * PITCH + 2j + c, so that a lane's values of consecutive j are
 * neighbours.
 */
#ifndef KBMLA_SM90_TILE_CUH
#define KBMLA_SM90_TILE_CUH

#include "../cuda/cuda_item.cuh"
#include "sm90_ptx.cuh"

enum {
    PANEL_BYTES = STAGE_TOKENS * 128,
    SWIZZLE_ATOM = 1024, /* 8 rows of 128 B: what the 128-byte swizzle repeats after */

    WARPGROUP = 128,
    THREADS = CONSUMERS + WARPGROUP,
    V_COLUMNS = KBMLA_HEAD_DIM_V / 2, /* of each consumer warpgroup */
    M_TILES = V_COLUMNS / 64,

    MAX_BLOCK_ROWS = 64,

    /* Of a thread; with 168 each at the launch, twice the first and once the second is what the SM
     * has. */
    CONSUMER_REGISTERS = 224,
    PRODUCER_REGISTERS = 56
};

static_assert(LATENT_BYTES == 4 * PANEL_BYTES, "the latent is four panels");
static_assert(KBMLA_TILE_TOKENS == 2 * STAGE_TOKENS, "a tile is one stage of each warpgroup");
static_assert(MAX_BLOCK_ROWS == 64, "the M side of a product");

/* What the consumers need of an item, written by the warp that loads Q. */
struct item_info {
    int32_t is_valid; /* 0 ends the walk */
    int32_t slot;
    int32_t tile_row;
    int32_t rows;
    uint32_t begin;
    uint32_t end;
    uint32_t clean_end; /* every row sees all tokens before it */
};

template <int N> struct sm90_smem {
    enum {
        STAGES = N <= 48 ? 5 : 4,
        /* The M side of scores; rows there would be padded to 64. */
        TOKENS_ARE_M = N < MAX_BLOCK_ROWS,
        /* As registers allow: panels of scores on their way behind the first, and fragments of V
         * that a thread holds, each of an m tile and a stage. */
        PANELS_AHEAD = N <= 32 ? 4 : 1 + (N <= 48),
        FRAGMENTS = N <= 48 ? 4 : 3,
        P_ROWS = (N + 15) / 16 * 16, /* stmatrix writes 8 rows of two matrices or four */
        LANE_ROWS = (N + 31) / 32,   /* where a warp's lanes share out rows: lane, lane + 32 */
        /* Parts of a row's scores that are weighed apart: warps, or warpgroups. */
        ROW_PARTS = TOKENS_ARE_M ? CONSUMER_WARPS : 2,
        /* Of a lane's positions: 16-byte loads, and the four lanes' in banks of their own. */
        PITCH = P_ROWS == 64 ? 20 : P_ROWS / 4,
        POSITIONS = 4 * PITCH,
        Q_PANEL_BYTES = N * 128
    };
    alignas(SWIZZLE_ATOM) uint8_t ring[STAGES][STAGE_BYTES];
    alignas(SWIZZLE_ATOM) uint8_t q[N * KBMLA_HEAD_DIM_QK];
    alignas(SWIZZLE_ATOM) uint8_t p[P_ROWS * 128]; /* of each row, half by each warpgroup */
    alignas(16) float rescale[POSITIONS];
    alignas(16) float factor[CONSUMER_WARPS][POSITIONS]; /* of the output; each warp its own */
    /* Maxima of a tile's parts, [N][ROW_PARTS], where rows are M [ROW_PARTS][N]; maxima kept,
     * by warpgroup and equal in both; sums over an item's parts. */
    alignas(16) float part_max[ROW_PARTS * N];
    float row_max[2][N], row_sum[ROW_PARTS][N];
    /* Of the even and the odd items: keys that a row sees, where it begins in `out` and in `lse`.
     */
    alignas(16) int32_t visible[2][N];
    int64_t out_at[2][N];
    int64_t lse_at[2][N];
    item_info item[2];
    alignas(8) uint64_t full_bar[STAGES];
    uint64_t empty_bar[STAGES];
    uint64_t query_full_bar;
    uint64_t query_empty_bar;
};

/* What a consumer thread knows of rows where tokens are the M side of scores. */
template <int N, bool = sm90_smem<N>::TOKENS_ARE_M> struct row_state {
    float sums[N / 4];                   /* over its tokens, of the rows of its scores */
    float fresh[N / 4];                  /* the same of the tile, not in `sums` yet */
    float kept[sm90_smem<N>::LANE_ROWS]; /* maxima */
};
/* Where rows are, of the warp's rows g and g + 8. */
template <int N> struct row_state<N, false> {
    float sums[2]; /* over its tokens */
    float top[2];  /* maxima, of the warpgroup's stage and then of the item */
};

/* Where the ring stands, in one register: a stage, plus STAGES in odd phases. */
template <int N> struct ring_place {
    uint32_t at;
    __device__ __forceinline__ uint32_t stage() const {
        return at < sm90_smem<N>::STAGES ? at : at - sm90_smem<N>::STAGES;
    }
    __device__ __forceinline__ uint32_t phase() const { return at >= sm90_smem<N>::STAGES; }
    __device__ __forceinline__ ring_place next() const {
        return {at + 1 == 2 * sm90_smem<N>::STAGES ? 0 : at + 1};
    }
};

/* ------------------------------------------------------------------ layouts */

/* Where the value of a row stands. */
template <int N> static __device__ __forceinline__ uint32_t row_position(uint32_t row) {
    return (row >> 1 & 3) * sm90_smem<N>::PITCH + 2 * (row >> 3) + (row & 1);
}

/* Byte of 16-byte chunk `chunk` (0..35) of row `row` in Q or a stage of `panel_bytes` panels. */
static __device__ __forceinline__ uint32_t row_chunk_offset(uint32_t row, uint32_t chunk,
                                                            uint32_t panel_bytes) {
    return chunk < 32 ? (chunk >> 3) * panel_bytes + row * 128 + (((chunk ^ row) & 7) << 4)
                      : 4 * panel_bytes + row * 64 + (((chunk ^ (row >> 1)) & 3) << 4);
}

/* Matrix descriptors of K-major operands (PTX ISA, "Matrix-Descriptor Format"): address, stride of
 * 8 rows, swizzle. An operand moves on by 32 bytes, 2 units, per step of 32 along K. */
static __device__ __forceinline__ uint64_t panel_descriptor(uint32_t smem) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 16 |
           (smem & 0x3FFFF) >> 4;
}
static __device__ __forceinline__ uint64_t rope_descriptor(uint32_t smem) {
    return (uint64_t)2 << 62 | (uint64_t)(512 >> 4) << 32 | (uint64_t)1 << 16 |
           (smem & 0x3FFFF) >> 4;
}

/* The same of an operand `bytes` further on. */
static __device__ __forceinline__ uint64_t moved(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

#endif
