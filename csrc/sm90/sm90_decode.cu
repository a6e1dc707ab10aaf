/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode for SM90a (H100, H200): FP8 tensor cores on both products, any row count in blocks of up
 * to 64 rows.
 *
 * wgmma takes E4M3 operands from shared memory only as they lie along K, and a KV row lies along
 * the channels. So the products are
 *
 *     S^T = K Q^T     the 64 tokens of a stage by N rows, both in shared memory
 *     O^T = V^T P^T   columns by N rows; V^T through ldmatrix in registers, P in shared memory
 *
 * Nothing is transposed in memory, and both cost what rows there are, rounded up to 16, 24, 32, 40,
 * 48, 56 or 64 (softmax: sm90_softmax_tokens.cuh). Blocks of 64 rows take S = Q K^T instead, at the
 * same cost: a row's scores are then in four lanes, and its maximum takes two shuffles
 * (sm90_softmax_rows.cuh).
 *
 * Two warpgroups share a tile of 128 tokens, two stages of the ring: each scores one of them, and
 * sums its 256 columns of O over both. They go through a tile in step:
 *
 *   TMA warp ----full_bar[stage]---> S of the warpgroup's stage, its maxima to the other
 *      ^                             barrier
 *      |                             P from the maxima of both stages, factors of older sums
 *      |                             barrier
 *      +-------empty_bar[stage]----- O = O * factors + V^T P^T of both stages
 *
 *   query warp --query_full_bar--> Q, item, visible of an item
 *      ^------query_empty_bar----- after the item's last scores
 *
 * A warpgroup at the first barrier of a tile has no product of the tile before on its way, so one
 * place for P, maxima and factors is enough. Where no tensor map describes the cache, or pages are
 * small, two warps copy rows instead.
 *
 * FP8 wgmma keeps 13 bits below the largest exponent of its sum and cuts off the rest, so O is
 * summed over one tile only and then added in FP32 registers; the rescale of a grown maximum rides
 * on that addition. The largest score of a tile is exact, no guess that would be corrected. Results
 * of unsplit requests go straight to `out`.
 *
 * Registers of a consumer thread: O 2N all along; N/2 scores and as many of each panel on its way,
 * or N/2 products of V, its fragments and N/4 factors; as many row sums, twice until the first
 * products of V, or few where rows are the M side. What a lane needs of addresses is kept beside
 * them. Relies on kbmla.c's checks, as every backend.
 */
#include "../cuda/cuda_item.cuh"
#include "../cuda/cuda_launch.h"
#include "sm90_output.cuh"
#include "sm90_products.cuh"
#include "sm90_producer.cuh"
#include "sm90_softmax_rows.cuh"
#include "sm90_softmax_tokens.cuh"
#include "sm90_tile.cuh"

/* ------------------------------------------------------------------ consumers */

/* A consumer thread, and where in shared memory it reads and writes. The compiler is kept from
 * computing these again in every tile. */
struct consumer {
    uint32_t lane, warp, group, block_warp;
    uint32_t values; /* V of the ring's stage 0 */
    uint32_t p;      /* of the warpgroup's stage */
    uint32_t row;    /* the warp's row g in an array of 4-byte values, in bytes */
};

template <int N> static __device__ __forceinline__ consumer make_consumer(sm90_smem<N> &smem) {
    const uint32_t lane = threadIdx.x & 31, block_warp = uniform(threadIdx.x >> 5),
                   group = block_warp >> 2, warp = block_warp & 3, row = 16 * warp + (lane >> 2);
    consumer self;
    self.lane = from_here(lane);
    self.block_warp = block_warp;
    self.warp = warp;
    self.group = group;
    self.values = from_here(smem_address(smem.ring) + group * (V_COLUMNS / 128) * PANEL_BYTES +
                            values_offset(warp, lane));
    self.p = from_here(smem_address(smem.p) + (sm90_smem<N>::TOKENS_ARE_M
                                                   ? token_p_offset<N>(block_warp, lane)
                                                   : row_p_offset(group, warp, lane)));
    self.row = from_here(4 * row);
    return self;
}

/* What consumers keep of an item in registers. */
struct item_stages {
    uint32_t parity;    /* of the item */
    uint32_t begin;     /* first token */
    uint32_t end;       /* of whole tiles: each warpgroup scores one stage of every one */
    uint32_t clean_end; /* as of item_info */
};

/* Scores of the warpgroup's stage at `own`, whose first token is `token` and which may be known to
 * be there; their maxima, for the other warps too. Releases Q behind the item's last, clears V past
 * its end. */
template <int N>
static __device__ __forceinline__ void
score(float (&s)[N / 2], row_state<N> &state, sm90_smem<N> &smem, const consumer &self,
      const item_stages &item, ring_place<N> own, uint32_t token, bool is_there) {
    const uint32_t stage = smem_address(smem.ring) + own.stage() * STAGE_BYTES,
                   visible = smem_address(smem.visible[item.parity]);
    if (!is_there)
        mbarrier_wait(smem_address(&smem.full_bar[own.stage()]), own.phase());
    compute_scores<N>(s, stage, smem_address(smem.q));
    if (token + KBMLA_TILE_TOKENS >= item.end && is_elected())
        mbarrier_arrive(smem_address(&smem.query_empty_bar));
    const bool is_masked = token + STAGE_TOKENS > item.clean_end;
    if (is_masked)
        clear_values(stage, token, smem.item[item.parity].end, self.warp, self.lane);
    if constexpr (sm90_smem<N>::TOKENS_ARE_M) {
        if (is_masked)
            mask_token_scores<N>(s, visible, token + 16 * self.warp, self.lane);
        share_token_maxima<N>(s, smem_address(&smem.part_max[self.block_warp]), self.lane);
    } else {
        const uint32_t top_at = smem_address(&smem.part_max[self.group * N]) + self.row;
        if (is_masked)
            mask_row_scores(s, visible + self.row, token, self.lane);
        row_maxima(state.top, s);
#pragma unroll
        for (int h = 0; h < 2; h++)
            store_shared_f32_if((self.lane & 3) == 0, top_at + 32 * h, state.top[h]);
    }
}

/* P of the warpgroup's stage from its scores and the maxima of both, its sums, and the factors of
 * older sums, which accumulate() applies to row sums too where tokens are the M side. Maxima kept
 * are worked out alike wherever they are needed. */
template <int N>
static __device__ __forceinline__ void weigh(const float (&s)[N / 2], row_state<N> &state,
                                             const decode_params &params, sm90_smem<N> &smem,
                                             const consumer &self, bool is_first_tile) {
    const float scale = params.softmax_scale_log2;
    if constexpr (sm90_smem<N>::TOKENS_ARE_M) {
#pragma unroll
        for (int i = 0; i < sm90_smem<N>::LANE_ROWS; i++) {
            const uint32_t row = min(32 * i + self.lane, (uint32_t)N - 1);
            const float seen = largest_part(smem_address(&smem.part_max[row * CONSUMER_WARPS]));
            const float top = grown_maximum(state.kept[i], seen, scale, params.growth);
            const float rescale = exp2_approx((state.kept[i] - top) * scale);
            state.kept[i] = top;
            store_shared_f32_if(self.block_warp == 0 && 32 * i + self.lane < N,
                                smem_address(&smem.rescale[row_position<N>(row)]), rescale);
        }
        exponentiate_tokens<N>(s, state.fresh, state.kept, scale, params.log2_p_scale, self.p,
                               self.lane);
    } else {
        const uint32_t other_at = smem_address(&smem.part_max[(self.group ^ 1) * N]) + self.row,
                       kept_at = smem_address(smem.row_max[self.group]) + self.row,
                       rescale_at = smem_address(smem.rescale) +
                                    4 * row_position<N>(from_here(self.row) / 4);
        float other[2], kept[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            other[h] = load_shared_f32(other_at + 32 * h);
            kept[h] = load_shared_f32(kept_at + 32 * h);
        }
        /* All lanes have read. */
        __syncwarp();
        float (&top)[2] = state.top;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            kept[h] = is_first_tile ? NO_MAXIMUM : kept[h];
            top[h] = grown_maximum(kept[h], fmaxf(top[h], other[h]), scale, params.growth);
            const float rescale = exp2_approx((kept[h] - top[h]) * scale);
            state.sums[h] *= rescale;
            store_shared_f32_if((self.lane & 3) == 0, kept_at + 32 * h, top[h]);
            store_shared_f32_if((self.lane & 3) == 0 && self.group == 0, rescale_at + 8 * h,
                                rescale);
        }
        exponentiate_rows(s, state.sums, top, scale, params.log2_p_scale, self.p);
    }
}

/* An item's sums and last maxima to shared memory. */
template <int N>
static __device__ __forceinline__ void share_rows(row_state<N> &state, sm90_smem<N> &smem,
                                                  const consumer &self, uint32_t lane) {
    if constexpr (sm90_smem<N>::TOKENS_ARE_M) {
        share_token_sums<N>(state.sums, smem.row_sum[self.block_warp], lane);
        if (self.block_warp == 0)
#pragma unroll
            for (int i = 0; i < sm90_smem<N>::LANE_ROWS; i++)
                if (32 * i + lane < N)
                    smem.row_max[0][32 * i + lane] = state.kept[i];
    } else {
        const uint32_t row = 16 * self.warp + (lane >> 2);
        sum_row_lanes(state.sums);
        if ((lane & 3) == 0)
#pragma unroll
            for (int h = 0; h < 2; h++)
                smem.row_sum[self.group][row + 8 * h] = state.sums[h];
    }
}

template <int N>
static __device__ __forceinline__ void consume(const decode_params &params, sm90_smem<N> &smem) {
    const consumer self = make_consumer<N>(smem);
    const uint32_t lane = self.lane, block_warp = self.block_warp;
    /* Of the next tile's first stage. Full barriers are waited for from phase 0 on, empty ones,
     * which nobody has used, from 1 on. */
    ring_place<N> first = {0};

    for (uint32_t parity = 0;; parity ^= 1) {
        mbarrier_wait(smem_address(&smem.query_full_bar), parity);
        const item_info &info = smem.item[parity];
        if (!uniform(info.is_valid))
            return;
        const uint32_t end = uniform(info.end);
        const item_stages item = {parity, (uint32_t)uniform(info.begin),
                                  (end + KBMLA_TILE_TOKENS - 1) / KBMLA_TILE_TOKENS *
                                      KBMLA_TILE_TOKENS,
                                  (uint32_t)uniform(info.clean_end)};
        const bool has_stages = item.begin < item.end;
        float o[M_TILES][N / 2] = {};
        row_state<N> state = {};
        if constexpr (sm90_smem<N>::TOKENS_ARE_M)
#pragma unroll
            for (float &kept : state.kept)
                kept = NO_MAXIMUM;

        bool is_own_there = false; /* its stage of the next tile, as far as is known */
#pragma unroll 1
        for (uint32_t token = item.begin; token < item.end; token += KBMLA_TILE_TOKENS) {
            const ring_place<N> second = first.next(), own = self.group == 0 ? first : second,
                                other = self.group == 0 ? second : first, next = own.next().next();
            const uint32_t other_full_bar = smem_address(&smem.full_bar[other.stage()]);
            float s[N / 2];
            score<N>(s, state, smem, self, item, own, token + self.group * STAGE_TOKENS,
                     is_own_there);
            /* Asked before the barrier: behind it the answer would cost its time. */
            const bool is_other_there =
                __all_sync(FULL_WARP, mbarrier_poll(other_full_bar, other.phase()));
            /* Both stages' maxima and cleared values are there; no product still reads P of the
             * tile before. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
            weigh<N>(s, state, params, smem, self, token == item.begin);
            fence_async_proxy();
            if (!is_other_there)
                mbarrier_wait(other_full_bar, other.phase());
            const tile_places tile = {{self.values + first.stage() * STAGE_BYTES,
                                       self.values + second.stage() * STAGE_BYTES},
                                      smem_address(smem.p),
                                      smem_address(&smem.rescale[(lane & 3) * sm90_smem<N>::PITCH]),
                                      {smem_address(&smem.empty_bar[first.stage()]),
                                       smem_address(&smem.empty_bar[second.stage()])},
                                      smem_address(&smem.full_bar[next.stage()]),
                                      next.phase()};
            /* The first of V needs no P: before the barrier, but behind the fence, which would wait
             * for it. */
            value_fragments<N> a;
            load_first_fragments<N>(a, tile);
            /* P of both stages is there, and the factors. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
            is_own_there = accumulate<N>(o, state, a, tile);
            first = second.next();
        }

        const item_rows rows = {uniform(info.slot), uniform(info.tile_row), uniform(info.rows)};
        if (has_stages) {
            share_rows<N>(state, smem, self, from_here(lane));
            /* All sums are written, and the last maxima. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
        } else if (lane == 0) {
            mbarrier_arrive(smem_address(&smem.query_empty_bar)); /* no scores will */
        }
        float *const factor = smem.factor[block_warp];
        float lse[sm90_smem<N>::LANE_ROWS];
        finish_rows<N>(params, smem, factor, lse, rows.slot < 0 ? params.output_scale : 1.0f,
                       has_stages, from_here(lane));
        __syncwarp();
        store_rows<N>(params, rows, o, factor, smem.out_at[parity], block_warp, from_here(lane));
        if (block_warp == 0)
#pragma unroll
            for (int i = 0; i < sm90_smem<N>::LANE_ROWS; i++)
                write_lse(params, rows, smem.lse_at[parity], 32 * i + (int32_t)from_here(lane),
                          lse[i]);
        __syncwarp();
    }
}

/* ------------------------------------------------------------------ kernel */

template <int N>
static __global__ void __launch_bounds__(THREADS, 1)
    sm90_decode_kernel(const __grid_constant__ decode_params params,
                       const __grid_constant__ sm90_maps maps) {
    extern __shared__ __align__(SWIZZLE_ATOM) uint8_t raw_smem[];
    sm90_smem<N> &smem = *reinterpret_cast<sm90_smem<N> *>(raw_smem);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < sm90_smem<N>::STAGES; stage++) {
            mbarrier_init(smem_address(&smem.full_bar[stage]),
                          maps.pages.is_tma ? 1 : (uint32_t)ROW_WARPS);
            mbarrier_init(smem_address(&smem.empty_bar[stage]), CONSUMER_WARPS);
        }
        mbarrier_init(smem_address(&smem.query_full_bar), 32);
        mbarrier_init(smem_address(&smem.query_empty_bar), CONSUMER_WARPS);
        fence_barrier_init();
        if (maps.query.is_tma) {
            prefetch_tensor_map(&maps.query.latent);
            prefetch_tensor_map(&maps.query.rope);
        }
        if (maps.pages.is_tma) {
            prefetch_tensor_map(&maps.pages.latent);
            prefetch_tensor_map(&maps.pages.rope);
        }
    }
    __syncthreads();
    /* Each producer waits for the kernel before where it first needs it, and triggers the next.
     * Consumers read and write memory only behind what the producers leave in shared memory, and
     * the block ends with its producers. */
    if (threadIdx.x < CONSUMERS) {
        prefetch_plan(params);
        warpgroup_take_registers<CONSUMER_REGISTERS>();
        consume<N>(params, smem);
        return;
    }
    warpgroup_give_registers<PRODUCER_REGISTERS>();
    const uint32_t producer_warp = (threadIdx.x - CONSUMERS) >> 5;
    if (producer_warp == QUERY_WARP)
        produce_query<N>(params, maps.query, smem);
    else if (!maps.pages.is_tma && producer_warp < ROW_WARPS)
        produce_rows<N>(params, smem, producer_warp);
    else if (maps.pages.is_tma && producer_warp == TMA_WARP)
        produce_pages<N>(params, maps.pages, smem);
}

/* ------------------------------------------------------------------ launch */

namespace {

struct decode_shape {
    int32_t blocks_per_cluster;
    int32_t block_rows;
    int32_t smem_bytes;
    const void *kernel;
};

template <int N> void fill_shape(decode_shape &shape) {
    static_assert(sizeof(sm90_smem<N>) <= 227 * 1024, "more than a block may have");
    shape.smem_bytes = (int32_t)sizeof(sm90_smem<N>);
    shape.kernel = reinterpret_cast<const void *>(sm90_decode_kernel<N>);
}

decode_shape choose_shape(int32_t q_tile_rows) {
    decode_shape shape = {};
    shape.blocks_per_cluster = kbmla_ceil_div(q_tile_rows, MAX_BLOCK_ROWS);
    const int32_t rows = kbmla_ceil_div(q_tile_rows, shape.blocks_per_cluster);
    shape.block_rows = kbmla_max(kbmla_ceil_div(rows, 8) * 8, 16);
    switch (shape.block_rows) {
    case 16:
        fill_shape<16>(shape);
        break;
    case 24:
        fill_shape<24>(shape);
        break;
    case 32:
        fill_shape<32>(shape);
        break;
    case 40:
        fill_shape<40>(shape);
        break;
    case 48:
        fill_shape<48>(shape);
        break;
    case 56:
        fill_shape<56>(shape);
        break;
    default:
        shape.block_rows = MAX_BLOCK_ROWS;
        fill_shape<MAX_BLOCK_ROWS>(shape);
        break;
    }
    return shape;
}

} // namespace

extern "C" int32_t kbmla_sm90_decode_clusters(const kbmla_sizes *sizes,
                                              const kbmla_cuda_device *device) {
    return kbmla_max(1, device->num_sms / choose_shape(sizes->q_tile_rows).blocks_per_cluster);
}

extern "C" kbmla_status kbmla_sm90_decode_prepare(const kbmla_sizes *sizes,
                                                  const kbmla_cuda_device *device,
                                                  kbmla_error *err) {
    RETURN_IF(!device->is_sm90, err, KBMLA_UNSUPPORTED,
              "backend: sm90 needs a device of compute capability 9.0");
    decode_shape shape = choose_shape(sizes->q_tile_rows);
    FORWARD_IF_ERROR(kbmla_sm90_find_encoder(err));
    CUDA_CHECK(cudaFuncSetAttribute(shape.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shape.smem_bytes),
               err);
    return KBMLA_OK;
}

extern "C" kbmla_status kbmla_sm90_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    decode_shape shape = choose_shape(sizes->q_tile_rows);
    decode_params params = make_decode_params(config, sizes, args);
    params.blocks_per_cluster = shape.blocks_per_cluster;
    params.block_rows = shape.block_rows;
    sm90_maps maps = {};
    kbmla_sm90_encode_pages(args, &maps.pages);
    kbmla_sm90_encode_query(args, config->num_heads, config->q_len, shape.block_rows, &maps.query);
    void *arguments[] = {&params, &maps};
    return kbmla_cuda_launch(shape.kernel, config->num_clusters * shape.blocks_per_cluster, 1,
                             THREADS, shape.smem_bytes, args->pdl != 0, arguments, stream, err);
}
