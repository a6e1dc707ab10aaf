/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A KV tile of the portable decode: its place in shared memory and the two products on it, for the
 * warps of a block. `scores` is QK over one tile, `accumulate` PV; in between the caller masks the
 * scores, forms P and stores it as FP16 fragments.
 *
 * E4M3 is widened to FP16 in registers, where it is exact. K of a tile is read as it lies; V is the
 * first 512 bytes of the same rows, transposed on the way by ldmatrix on pairs of bytes.
 */
#ifndef KBMLA_CUDA_DECODE_TILE_CUH
#define KBMLA_CUDA_DECODE_TILE_CUH

#include "cuda_item.cuh"
#include "cuda_ptx.cuh"

enum {
    MAX_STAGES = 4,
    MAX_BLOCK_ROWS = 32,            /* two m tiles: 64 accumulators a thread; more would spill */
    PANELS = KBMLA_HEAD_DIM_QK / 64 /* groups of 64 channels: one 16-byte load per lane each */
};

/* Threads and shared memory of a block, the latter in this order. */
template <int M_TILES> struct decode_smem {
    enum {
        /* As many as the registers of the consumers leave room for. */
        PRODUCER_WARPS = M_TILES == 1 ? 2 : 4,
        THREADS = CONSUMERS + 32 * PRODUCER_WARPS,
        BLOCKS_PER_SM = M_TILES == 1 ? 2 : 1,
        Q = 0, /* FP16 A fragments [M_TILES, PANELS, 4, 32] x 16 B */
        P = Q + M_TILES * PANELS * 4 * 32 *
                    16, /* FP16 A fragments [M_TILES, STAGE_TOKENS/16, 32] x 16 B */
        ROW_STAT = P +
            M_TILES * (STAGE_TOKENS / 16) * 32 * 16, /* float [16 * M_TILES, CONSUMER_WARPS] */
        BARRIERS = ROW_STAT + 16 * M_TILES * CONSUMER_WARPS * 4, /* full, empty [MAX_STAGES] */
        RING = BARRIERS + 2 * MAX_STAGES * 8,
        FIXED = (RING + 127) / 128 * 128
    };
};

/* Slot of 16 bytes in a latent row of the ring: rows r and r + 1 differ in bit 2 (16-byte loads of
 * two rows do not meet) and 8 consecutive rows in all three bits (nor do ldmatrix's). */
static __device__ __forceinline__ uint32_t latent_offset(uint32_t row, uint32_t slot) {
    return row * KBMLA_HEAD_DIM_V + ((slot ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4);
}

/* Scores += Q K^T over one panel of 64 channels; `k_smem` is this lane's 16 bytes of its token. */
template <int M_TILES, int CHAINS>
static __device__ __forceinline__ void panel_scores(float (&part)[CHAINS][M_TILES][4],
                                                    uint32_t k_smem, uint32_t q_smem) {
    uint4 bytes = load_shared_16(k_smem);
    const uint32_t k[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t b[4][2];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        b[step][0] = e4m3x2_to_half2(k[step]);
        b[step][1] = e4m3x2_to_half2(k[step] >> 16);
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        uint32_t at = q_smem + m * PANELS * 4 * 32 * 16;
        uint4 low0 = load_shared_16(at), low1 = load_shared_16(at + 512);
        uint4 high0 = load_shared_16(at + 1024), high1 = load_shared_16(at + 1536);
        const uint32_t a[4][4] = {{low0.x, high0.x, low0.y, high0.y},
                                  {low0.z, high0.z, low0.w, high0.w},
                                  {low1.x, high1.x, low1.y, high1.y},
                                  {low1.z, high1.z, low1.w, high1.w}};
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma_m16n8k16(part[step % CHAINS][m], a[step], b[step][0], b[step][1]);
    }
}

/* Scores of all rows against this warp's 8 tokens. Each m tile sums in CHAINS parts, since one
 * chain of 36 dependent mma would cost its full latency. */
template <int M_TILES>
static __device__ __forceinline__ void scores(float (&s)[M_TILES][4], uint32_t latent,
                                              uint32_t q_smem, uint32_t warp, uint32_t lane) {
    constexpr int CHAINS = 2;
    float part[CHAINS][M_TILES][4] = {};
    const uint32_t row = 8 * warp + (lane >> 2), column = lane & 3;
    q_smem += 16 * lane;
#pragma unroll 1
    for (int panel = 0; panel < PANELS - 1; panel++)
        panel_scores<M_TILES, CHAINS>(part, latent + latent_offset(row, 4 * panel + column),
                                      q_smem + panel * 4 * 32 * 16);
    panel_scores<M_TILES, CHAINS>(part, latent + LATENT_BYTES + row * 64 + 16 * column,
                                  q_smem + (PANELS - 1) * 4 * 32 * 16);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[m][i] = part[0][m][i];
#pragma unroll
            for (int chain = 1; chain < CHAINS; chain++)
                s[m][i] += part[chain][m][i];
        }
}

/* O += P V for this warp's 64 columns. A pair of d columns comes out of ldmatrix as bytes of two
 * tokens; the even and the odd columns of 16 make two n tiles, so o[m][2c], o[m][2c+1] hold columns
 * 16c + 4 * (lane % 4) + {0, 2} and + {1, 3}. */
template <int M_TILES>
static __device__ __forceinline__ void accumulate(float (&o)[M_TILES][8][4], uint32_t latent,
                                                  uint32_t p_smem, uint32_t warp, uint32_t lane) {
#pragma unroll
    for (int k = 0; k < STAGE_TOKENS / 16; k++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            uint4 p = load_shared_16(p_smem + ((m * (STAGE_TOKENS / 16) + k) * 32 + lane) * 16);
            a[m][0] = p.x;
            a[m][1] = p.y;
            a[m][2] = p.z;
            a[m][3] = p.w;
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t v[4]; /* tokens 0-7, 8-15 of chunk 2*pair, then of chunk 2*pair + 1 */
            uint32_t token = 16 * k + (lane & 15), chunk = 4 * warp + 2 * pair + (lane >> 4);
            ldmatrix_x4_trans(v, latent + latent_offset(token, chunk));
#pragma unroll
            for (int c = 0; c < 2; c++) {
                uint32_t low = __byte_perm(v[2 * c], 0, 0x3120);
                uint32_t high = __byte_perm(v[2 * c + 1], 0, 0x3120);
                uint32_t even0 = e4m3x2_to_half2(low), odd0 = e4m3x2_to_half2(low >> 16);
                uint32_t even1 = e4m3x2_to_half2(high), odd1 = e4m3x2_to_half2(high >> 16);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16(o[m][4 * pair + 2 * c], a[m], even0, even1);
                    mma_m16n8k16(o[m][4 * pair + 2 * c + 1], a[m], odd0, odd1);
                }
            }
        }
    }
}

/* Combines one value per row over the 8 consumer warps, in their order, for the lane's rows. */
template <int M_TILES, typename Combine>
static __device__ __forceinline__ void across_warps(float (&value)[M_TILES][2], float *row_stat,
                                                    uint32_t warp, uint32_t lane, Combine combine) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = value[m][half];
            x = combine(x, __shfl_xor_sync(FULL_WARP, x, 1));
            x = combine(x, __shfl_xor_sync(FULL_WARP, x, 2));
            if ((lane & 3) == 0)
                row_stat[(16 * m + 8 * half + (lane >> 2)) * CONSUMER_WARPS + warp] = x;
        }
    named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 *from = reinterpret_cast<const float4 *>(
                row_stat + (16 * m + 8 * half + (lane >> 2)) * CONSUMER_WARPS);
            float4 x = from[0], y = from[1];
            value[m][half] = combine(combine(combine(x.x, x.y), combine(x.z, x.w)),
                                     combine(combine(y.x, y.y), combine(y.z, y.w)));
        }
}

struct take_max {
    __device__ float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};
struct take_sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

#endif
