/*
 * Decode for SM90a (H100, H200): FP8 tensor cores on both products, any row count in blocks of up
 * to 64 rows.
 *
 * wgmma takes E4M3 operands from shared memory only as they lie along K, and a KV row lies along
 * the channels. So both products have tokens or columns as their M side and query rows as N:
 *
 *     S^T = K Q^T     K of 64 tokens from the ring, Q from shared memory
 *     O^T = V^T P^T   V^T through ldmatrix in registers, P from shared memory
 *
 * Nothing is transposed in memory, and N is the rows there are, rounded up to 16, 24, 32, 40, 48
 * or 64.
 *
 *   TMA warp --full_bar[stage]--> warpgroup w: scores of stage w of the tile       64 tokens
 *      ^                          its maxima to tile_max              (barrier)
 *      |                          P of its tokens, sums               (barrier)
 *      +-----empty_bar[stage]---- columns 256w.. of O += V^T P^T     128 tokens
 *
 *   query warp --query_full_bar--> Q, item, visible of an item
 *      ^------query_empty_bar----- after the item's last scores
 *
 * Where no tensor map describes the cache, or pages are small, two warps copy rows instead.
 *
 * FP8 wgmma keeps 13 bits below the largest exponent of its sum and cuts off the rest, so O is
 * summed over one tile only and then added in FP32 registers; the rescale of a grown maximum rides
 * on that addition. The maximum is exact on every tile. Results of unsplit requests go straight to
 * `out`.
 *
 * Registers of a consumer thread: O 2N and sums N/4 all along; scores N/2 and those of one panel
 * N/2, or one m tile's products N/2 and V fragments 16 or 32. Relies on kbmla.c's checks, as every
 * backend.
 */
#include "../cuda/cuda_item.cuh"
#include "../cuda/cuda_launch.h"
#include "sm90_products.cuh"
#include "sm90_producer.cuh"
#include "sm90_softmax.cuh"
#include "sm90_tile.cuh"

/* ------------------------------------------------------------------ consumers */

/* The row whose value pair `lane` of the positions begins with. */
template <int N> static __device__ __forceinline__ int32_t pair_row(uint32_t lane) {
    return (int32_t)(8 * (lane % (N / 8)) + 2 * (lane / (N / 8)));
}

static __device__ __forceinline__ void write_lse(const decode_params &params, const item_info &item,
                                                 const int64_t *lse_at, int32_t local, float lse) {
    if (local >= item.rows)
        return;
    if (item.slot >= 0)
        *partial_lse(params, partial_row(params, item.slot, item.tile_row, local)) = lse;
    else if (params.args.lse != NULL)
        params.args.lse[lse_at[local]] = lse;
}

/* What a row of O is multiplied by, and its lse. A row that has seen no key has sum 0. */
static __device__ __forceinline__ float finish_row(const decode_params &params,
                                                   const item_info &item, const int64_t *lse_at,
                                                   int32_t local, float sum, float maximum,
                                                   bool writes_lse) {
    const bool is_empty = sum == 0.0f;
    if (writes_lse)
        write_lse(params, item, lse_at, local,
                  is_empty
                      ? -INFINITY
                      : log2f(sum) - params.log2_p_scale + maximum * params.softmax_scale_log2);
    return is_empty ? 0.0f : (item.slot < 0 ? params.output_scale : 1.0f) / sum;
}

/* By selection: O of a row that has seen no key is 0 times values that may be anything. */
static __device__ __forceinline__ float scaled(float o, float factor) {
    return factor == 0.0f ? 0.0f : o * factor;
}

/* Writes a block's O, each row times its factor. A lane has columns 2g and 2g + 1 of each 64 of its
 * rows 2t and 2t + 1 of each 8. */
template <int N>
static __device__ __forceinline__ void
store_rows(const decode_params &params, const item_info &item, const float (&o)[M_TILES][N / 2],
           const float *factor, const int64_t *out_at, uint32_t consumer_warp, uint32_t lane) {
    const int32_t first_row = 2 * (int32_t)(lane & 3);
    const int32_t column =
        (int32_t)(consumer_warp / 4 * V_COLUMNS + consumer_warp % 4 * 16 + 2 * (lane >> 2));
    factor += (lane & 3) * sm90_smem<N>::PITCH;
    if (item.slot < 0) {
        __nv_bfloat16 *out = reinterpret_cast<__nv_bfloat16 *>(params.args.out) + column;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int32_t local = 8 * (i >> 1) + first_row + (i & 1), at = 4 * (i >> 1) + (i & 1);
            if (local < item.rows)
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    *reinterpret_cast<__nv_bfloat162 *>(out + out_at[local] + 64 * m) =
                        __floats2bfloat162_rn(scaled(o[m][at], factor[i]),
                                              scaled(o[m][at + 2], factor[i]));
        }
        return;
    }
    const int64_t first = partial_row(params, item.slot, item.tile_row, first_row);
    float *to = static_cast<float *>(params.args.workspace) + first * KBMLA_HEAD_DIM_V + column;
    __half *to_half =
        static_cast<__half *>(params.args.workspace) + first * KBMLA_HEAD_DIM_V + column;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int32_t local = 8 * (i >> 1) + (i & 1), at = 4 * (i >> 1) + (i & 1);
        if (first_row + local < item.rows)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const float x = scaled(o[m][at], factor[i]), y = scaled(o[m][at + 2], factor[i]);
                const int32_t offset = local * KBMLA_HEAD_DIM_V + 64 * m;
                if (params.partial_fp16)
                    *reinterpret_cast<__half2 *>(to_half + offset) = __floats2half2_rn(x, y);
                else
                    *reinterpret_cast<float2 *>(to + offset) = make_float2(x, y);
            }
    }
}

/* The stage of a tile whose scores this warpgroup computes, and the other one. */
template <int N>
static __device__ __forceinline__ ring_place<N> own_stage(ring_place<N> first, uint32_t group) {
    return group == 0 ? first : first.next();
}
template <int N>
static __device__ __forceinline__ ring_place<N> other_stage(ring_place<N> first, uint32_t group) {
    return group == 0 ? first.next() : first;
}

template <int N>
static __device__ __forceinline__ void consume(const decode_params &params, sm90_smem<N> &smem) {
    const uint32_t lane = threadIdx.x & 31, consumer_warp = uniform(threadIdx.x >> 5),
                   warp = consumer_warp & 3, group = consumer_warp >> 2;
    const uint32_t ring = smem_address(smem.ring), q = smem_address(smem.q),
                   p = smem_address(smem.p), full = smem_address(smem.full_bar),
                   empty = smem_address(smem.empty_bar);
    const float scale = params.softmax_scale_log2;
    float *const row_max = smem.row_max[consumer_warp], *const rescale =
                                                            smem.rescale[consumer_warp];
    ring_place<N> place = {0}; /* of the first stage of a tile */

    for (uint32_t parity = 0;; parity ^= 1) {
        mbarrier_wait(smem_address(&smem.query_full_bar), parity);
        const item_info &item = smem.item[parity];
        if (!uniform(item.is_valid))
            return;
        const uint32_t begin = uniform(item.begin), end = uniform(item.end);
        float o[M_TILES][N / 2] = {}, l[N / 4] = {}, s[N / 2];
        forget_maxima<N>(row_max, lane);

        constexpr bool SCORES_AHEAD = sm90_smem<N>::SCORES_AHEAD;
        if (SCORES_AHEAD && begin < end) {
            const ring_place<N> mine = own_stage(place, group);
            mbarrier_wait(full + 8 * mine.stage(), mine.phase());
            compute_scores<N>(s, ring + mine.stage() * STAGE_BYTES, q);
        }
#pragma unroll 1
        for (uint32_t token = begin; token < end; token += KBMLA_TILE_TOKENS) {
            const bool is_last = token + KBMLA_TILE_TOKENS >= end;
            if constexpr (!SCORES_AHEAD) {
                const ring_place<N> mine = own_stage(place, group);
                mbarrier_wait(full + 8 * mine.stage(), mine.phase());
                compute_scores<N>(s, ring + mine.stage() * STAGE_BYTES, q);
            }
            if (is_last && lane == 0)
                mbarrier_arrive(smem_address(&smem.query_empty_bar));
            if (token + KBMLA_TILE_TOKENS > uniform(item.clean_end)) {
                const uint32_t first = token + group * STAGE_TOKENS;
                mask_scores<N>(s, smem.visible[parity], first, warp, lane);
                clear_values(ring + own_stage(place, group).stage() * STAGE_BYTES, first, end, warp,
                             lane);
            }
            write_tile_maxima<N>(s, smem.tile_max[consumer_warp], lane);
            /* All maxima are written, and P of the tile before is no longer read. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
            update_maxima<N>(smem, scale, params.growth, consumer_warp, lane);
            exponentiate<N>(s, l, row_max, rescale, scale, params.log2_p_scale, p, consumer_warp,
                            lane);
            fence_async_proxy();
            /* All of P is written, and tile_max is no longer read. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);

            const ring_place<N> other = place.next();
            mbarrier_wait(full + 8 * other_stage(place, group).stage(),
                          other_stage(place, group).phase());
            const uint32_t columns = ring + group * (V_COLUMNS / 128) * PANEL_BYTES;
            const uint32_t latent[2] = {columns + place.stage() * STAGE_BYTES,
                                        columns + other.stage() * STAGE_BYTES};
            place = other.next();
            if (!SCORES_AHEAD || is_last) {
                accumulate<N>(o, latent, p, rescale, warp, lane);
            } else if constexpr (SCORES_AHEAD) {
                const ring_place<N> mine = own_stage(place, group);
                mbarrier_wait(full + 8 * mine.stage(), mine.phase());
                accumulate_and_score<N>(o, s, latent, p, rescale, ring + mine.stage() * STAGE_BYTES,
                                        q, warp, lane);
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(empty + 8 * place.previous().previous().stage());
                mbarrier_arrive(empty + 8 * place.previous().stage());
            }
        }

        float2 sum = make_float2(0.0f, 0.0f);
        if (begin < end) {
            combine_rows<N>(l, smem.row_sum[consumer_warp], lane, take_sum());
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
            if (lane < N / 2)
                sum = combine_warps<N>(smem.row_sum, pair_position<N>(lane), take_sum());
        } else if (lane == 0) {
            mbarrier_arrive(smem_address(&smem.query_empty_bar));
        }
        if (lane < N / 2) {
            const bool is_writer = consumer_warp == 0;
            const int32_t row = pair_row<N>(from_here(lane));
            const uint32_t position = pair_position<N>(lane);
            const float2 kept = *reinterpret_cast<const float2 *>(&row_max[position]);
            *reinterpret_cast<float2 *>(&rescale[position]) = make_float2(
                finish_row(params, item, smem.lse_at[parity], row, sum.x, kept.x, is_writer),
                finish_row(params, item, smem.lse_at[parity], row + 1, sum.y, kept.y, is_writer));
        }
        __syncwarp();
        store_rows<N>(params, item, o, rescale, smem.out_at[parity], consumer_warp, lane);
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
        mbarrier_init(smem_address(&smem.query_full_bar), 1);
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
    grid_dependency_launch();
    grid_dependency_wait();

    if (threadIdx.x < CONSUMERS) {
        warpgroup_take_registers<sm90_smem<N>::CONSUMER_REGISTERS>();
        consume<N>(params, smem);
        return;
    }
    warpgroup_give_registers<sm90_smem<N>::PRODUCER_REGISTERS>();
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
    return kbmla_cuda_launch(shape.kernel, config->num_clusters * shape.blocks_per_cluster, THREADS,
                             shape.smem_bytes, args->pdl != 0, arguments, stream, err);
}
