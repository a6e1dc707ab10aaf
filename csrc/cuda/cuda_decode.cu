/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Portable decode, sm_80 and later: one source, FP16 tensor cores, any page size and stride.
 *
 * A block takes up to MAX_BLOCK_ROWS rows of a q tile. It walks the work list with producer warps,
 * which copy KV tiles of 64 tokens into a ring of shared memory, and eight consumer warps:
 *
 *   producers -full_bar--> QK: warp w takes tokens 8w..8w+7 of the tile, all rows
 *       ^                  row maxima through shared memory        (barrier)
 *       |                  P = E4M3(exp2(...)) to shared memory    (barrier)
 *       +----empty_bar---- PV: warp w takes columns 64w..64w+63, all rows and tokens
 *
 * The producers walk the same list on their own and run ahead into the next item; only ring space
 * stops them. E4M3 values are exact in FP16, and so are the products P * V, since P is rounded to
 * E4M3 first. The rule of the lazy maximum is that of the CPU backend on tiles of 64 keys.
 *
 * Relies on kbmla.c's checks and on 16-byte aligned query and cache rows. Bytes past a request's
 * length are never loaded: their slots are zero-filled, and their scores masked by selection.
 */
#include "cuda_decode_tile.cuh"
#include "cuda_item.cuh"
#include "cuda_launch.h"

/* ------------------------------------------------------------------ items */

static __device__ __forceinline__ request_facts load_facts(const decode_params &params,
                                                           int32_t batch) {
    return {params.args.lengths[batch], params.args.counts[batch],
            params.args.work[params.tail + batch]};
}

/* Lane i: those of request i, for load_item, so that no load waits for an entry to name a request.
 */
static __device__ __forceinline__ request_facts load_lane_facts(const decode_params &params) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    request_facts none = {0, 0, 0};
    return lane < params.args.num_requests ? load_facts(params, lane) : none;
}

/* The item of a tile from lane facts. All lanes of a warp call it alike. */
static __device__ __forceinline__ bool load_item(const decode_params &params,
                                                 const request_facts &lane_facts,
                                                 const kbmla_tile &tile, work_item &item) {
    request_facts facts = lane_facts;
    if (tile.batch >= 32)
        facts = load_facts(params, tile.batch);
    /* From request 32 on all lanes hold the same. */
    facts.length = __shfl_sync(FULL_WARP, facts.length, tile.batch);
    facts.planned = __shfl_sync(FULL_WARP, facts.planned, tile.batch);
    facts.element = __shfl_sync(FULL_WARP, facts.element, tile.batch);
    return make_item(params, facts, tile, item);
}

/* ------------------------------------------------------------------ producers */

/* Copies ROWS rows of a tile, from `first` on, into the ring. Lane l holds in `row` the address of
 * row first + l % ROWS: 0 for a token past the end, whose slot is zero-filled; a missing row reads
 * as NaN. */
template <int ROWS>
static __device__ __forceinline__ void copy_rows(uint64_t row, uint32_t first, uint32_t latent,
                                                 uint32_t lane, uint64_t policy) {
    const uint32_t rope = latent + LATENT_BYTES;
    if (__all_sync(FULL_WARP, row > MISSING_ROW)) {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            cp_async_16(latent + latent_offset(first + r, lane),
                        (const uint8_t *)__shfl_sync(FULL_WARP, row, r) + 16 * lane, policy);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r += 8)
            cp_async_16(rope + (first + r) * 64 + 16 * lane,
                        (const uint8_t *)__shfl_sync(FULL_WARP, row, r + (lane >> 2)) +
                            KBMLA_HEAD_DIM_V + 16 * (lane & 3),
                        policy);
        return;
    }
#pragma unroll 1
    for (uint32_t r = 0; r < ROWS; r++) {
        uint64_t from = __shfl_sync(FULL_WARP, row, r);
        uint32_t to = latent + latent_offset(first + r, lane);
        uint32_t rope_to = rope + (first + r) * 64 + 16 * lane;
        if (from > MISSING_ROW) {
            cp_async_16(to, (const uint8_t *)from + 16 * lane, policy);
            if (lane < 4)
                cp_async_16(rope_to, (const uint8_t *)from + KBMLA_HEAD_DIM_V + 16 * lane, policy);
        } else {
            store_shared_16(to, from == 0 ? 0 : NAN_BYTES);
            if (lane < 4)
                store_shared_16(rope_to, from == 0 ? 0 : NAN_BYTES);
        }
    }
}

template <int M_TILES>
static __device__ void produce(const decode_params &params, uint32_t ring, uint32_t full_bar,
                               uint32_t empty_bar, kbmla_work_walk walk) {
    constexpr uint32_t ROWS = STAGE_TOKENS / decode_smem<M_TILES>::PRODUCER_WARPS;
    const kbmla_decode_args &args = params.args;
    const uint32_t lane = threadIdx.x & 31, first = (threadIdx.x - CONSUMERS) / 32 * ROWS;
    const uint64_t policy = l2_evict_first();
    uint32_t stage = 0, phase = 0;
    const request_facts facts = load_lane_facts(params);
    for (kbmla_tile tile = kbmla_work_walk_current(&walk); tile.is_valid;
         kbmla_work_walk_advance(&walk, 1), tile = kbmla_work_walk_current(&walk)) {
        work_item item;
        if (!load_item(params, facts, tile, item))
            continue;
        const int32_t *table = args.block_table + item.batch * args.block_table_stride;
        for (uint32_t token = item.begin; token < item.end; token += STAGE_TOKENS) {
            uint32_t at = token + first + lane % ROWS;
            uint64_t row = at < item.end ? cache_row(params, table, at) : 0;
            mbarrier_wait(empty_bar + 8 * stage, phase ^ 1);
            copy_rows<ROWS>(row, first, ring + stage * STAGE_BYTES, lane, policy);
            /* Two arrivals of every lane: one when its copies have landed, one for plain stores. */
            cp_async_mbarrier_arrive(full_bar + 8 * stage);
            mbarrier_arrive(full_bar + 8 * stage);
            if (++stage == (uint32_t)params.num_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

/* ------------------------------------------------------------------ consumers */

/* Q of the block's rows as FP16 A fragments; rows that do not exist are zero. Channels are
 * assigned to k so that a lane's four k of step s are bytes 16c + 4s .. + 3 of a 64-byte panel. */
template <int M_TILES>
static __device__ void load_query(const decode_params &params, const work_item &item,
                                  uint32_t q_smem) {
    for (int32_t i = threadIdx.x; i < M_TILES * PANELS * 4 * 32; i += CONSUMERS) {
        int32_t lane = i & 31, part = i >> 5 & 3, panel = (i >> 7) % PANELS, m = (i >> 7) / PANELS;
        int32_t local = 16 * m + (lane >> 2) + 8 * (part >> 1);
        uint32_t halves[4] = {0, 0, 0, 0};
        if (local < item.rows) {
            const uint8_t *from = query_row(params, item.batch, item.first_row + local) +
                                  64 * panel + 16 * (lane & 3) + 8 * (part & 1);
            uint2 bytes = *reinterpret_cast<const uint2 *>(from);
            halves[0] = e4m3x2_to_half2(bytes.x);
            halves[1] = e4m3x2_to_half2(bytes.x >> 16);
            halves[2] = e4m3x2_to_half2(bytes.y);
            halves[3] = e4m3x2_to_half2(bytes.y >> 16);
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(q_smem + 16 * i),
                     "r"(halves[0]), "r"(halves[1]), "r"(halves[2]), "r"(halves[3])
                     : "memory");
    }
}

template <int M_TILES>
static __device__ void store_rows(const decode_params &params, const work_item &item,
                                  const float (&o)[M_TILES][8][4], const float (&l)[M_TILES][2],
                                  const float (&row_max)[M_TILES][2], uint32_t warp,
                                  uint32_t lane) {
    const kbmla_decode_args &args = params.args;
    const int32_t column = 64 * warp + 4 * (lane & 3);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int32_t local = 16 * m + 8 * half + (int32_t)(lane >> 2);
            if (local >= item.rows)
                continue;
            float sum = l[m][half];
            bool is_empty = sum == 0.0f;
            float scale = is_empty ? 0.0f : 1.0f / (sum * params.p_scale);
            float lse =
                is_empty ? -INFINITY : log2f(sum) + row_max[m][half] * params.softmax_scale_log2;
            float value[4][4];
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    value[c][i] =
                        is_empty ? 0.0f : o[m][2 * c + (i & 1)][2 * half + (i >> 1)] * scale;
            int32_t row = item.first_row + local;
            if (item.slot < 0) {
                __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(args.out) +
                                    kbmla_out_row(&args, params.num_heads, item.batch, row) +
                                    column;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    __nv_bfloat162 low = __floats2bfloat162_rn(value[c][0] * params.output_scale,
                                                               value[c][1] * params.output_scale);
                    __nv_bfloat162 high = __floats2bfloat162_rn(value[c][2] * params.output_scale,
                                                                value[c][3] * params.output_scale);
                    *reinterpret_cast<uint2 *>(to + 16 * c) = make_uint2(
                        *reinterpret_cast<uint32_t *>(&low), *reinterpret_cast<uint32_t *>(&high));
                }
                if (args.lse != NULL && warp == 0 && (lane & 3) == 0)
                    args.lse[kbmla_lse_row(&args, params.num_heads, item.batch, row)] = lse;
                continue;
            }
            int64_t slot_row = partial_row(params, item.slot, item.tile_row, local);
            if (params.partial_fp16) {
                __half *to =
                    static_cast<__half *>(args.workspace) + slot_row * KBMLA_HEAD_DIM_V + column;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    __half2 low = __floats2half2_rn(value[c][0], value[c][1]);
                    __half2 high = __floats2half2_rn(value[c][2], value[c][3]);
                    *reinterpret_cast<uint2 *>(to + 16 * c) = make_uint2(
                        *reinterpret_cast<uint32_t *>(&low), *reinterpret_cast<uint32_t *>(&high));
                }
            } else {
                float *to =
                    static_cast<float *>(args.workspace) + slot_row * KBMLA_HEAD_DIM_V + column;
#pragma unroll
                for (int c = 0; c < 4; c++)
                    *reinterpret_cast<float4 *>(to + 16 * c) =
                        make_float4(value[c][0], value[c][1], value[c][2], value[c][3]);
            }
            if (warp == 0 && (lane & 3) == 0)
                *partial_lse(params, slot_row) = lse;
        }
    }
}

template <int M_TILES>
static __device__ void consume(const decode_params &params, uint8_t *smem, uint32_t ring,
                               uint32_t full_bar, uint32_t empty_bar, kbmla_work_walk walk) {
    using layout = decode_smem<M_TILES>;
    const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t q_smem = smem_address(smem + layout::Q), p_smem = smem_address(smem + layout::P);
    float *row_stat = reinterpret_cast<float *>(smem + layout::ROW_STAT);
    const float scale = params.softmax_scale_log2;
    uint32_t stage = 0, phase = 0;

    const request_facts facts = load_lane_facts(params);
    for (kbmla_tile tile = kbmla_work_walk_current(&walk); tile.is_valid;
         kbmla_work_walk_advance(&walk, 1), tile = kbmla_work_walk_current(&walk)) {
        work_item item;
        if (!load_item(params, facts, tile, item))
            continue;
        /* Every warp has left the previous item's last PV, but may still read Q and row_stat. */
        named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
        load_query<M_TILES>(params, item, q_smem);
        named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);

        uint32_t visible[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int32_t local = 16 * m + 8 * half + (int32_t)(lane >> 2);
                visible[m][half] = local < item.rows ? visible_keys(params, item.batch, item.length,
                                                                    item.first_row + local)
                                                     : 0;
            }

        float o[M_TILES][8][4] = {};
        float l[M_TILES][2] = {}, row_max[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            row_max[m][0] = row_max[m][1] = -INFINITY;

        for (uint32_t token = item.begin; token < item.end; token += STAGE_TOKENS) {
            const uint32_t latent = ring + stage * STAGE_BYTES;
            mbarrier_wait(full_bar + 8 * stage, phase);

            float s[M_TILES][4];
            scores<M_TILES>(s, latent, q_smem, warp, lane);
            float tile_max[M_TILES][2];
            const uint32_t key = token + 8 * warp + 2 * (lane & 3);
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &s0 = s[m][2 * half], &s1 = s[m][2 * half + 1];
                    s0 = key < visible[m][half] ? s0 : -INFINITY;
                    s1 = key + 1 < visible[m][half] ? s1 : -INFINITY;
                    tile_max[m][half] = take_max()(s0, s1);
                }
            across_warps<M_TILES>(tile_max, row_stat, warp, lane, take_max());

            float alpha[M_TILES][2];
            bool has_rescale = false;
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float old = row_max[m][half], seen = tile_max[m][half];
                    /* The first visible key always sets the maximum: its growth is inf. A row that
                     * has seen none has growth NaN and keeps -inf. */
                    bool is_kept = !((seen - old) * scale > params.growth);
                    alpha[m][half] = is_kept ? 1.0f : exp2_approx((old - seen) * scale);
                    row_max[m][half] = is_kept ? old : seen;
                    has_rescale |= !is_kept;
                    /* The difference first: it is exact near the maximum, where scaled scores of
                     * 1e7 would be rounded by whole per cents of P. */
                    float top = row_max[m][half] == -INFINITY ? 0.0f : row_max[m][half];
                    float p0 = exp2_approx((s[m][2 * half] - top) * scale);
                    float p1 = exp2_approx((s[m][2 * half + 1] - top) * scale);
                    l[m][half] = l[m][half] * alpha[m][half] + (p0 + p1);
                    uint32_t p = round_e4m3_half2(p0 * params.p_scale, p1 * params.p_scale);
                    /* Fragment register: 0 and 1 are tokens 0-7 of 16, rows g and g + 8. */
                    uint32_t to = p_smem +
                                  ((m * (STAGE_TOKENS / 16) + (warp >> 1)) * 32 + lane) * 16 +
                                  ((warp & 1) * 2 + half) * 4;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(p) : "memory");
                }
            if (__any_sync(FULL_WARP, has_rescale)) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            o[m][n][i] *= alpha[m][i >> 1];
            }
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);

            accumulate<M_TILES>(o, latent, p_smem, warp, lane);
            mbarrier_arrive(empty_bar + 8 * stage); /* each lane for what it read */
            if (++stage == (uint32_t)params.num_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
        /* row_stat may still be read by a warp that is late in the last tile's maxima. */
        named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
        across_warps<M_TILES>(l, row_stat, warp, lane, take_sum());
        store_rows<M_TILES>(params, item, o, l, row_max, warp, lane);
    }
}

template <int M_TILES>
static __global__ void __launch_bounds__(decode_smem<M_TILES>::THREADS,
                                         decode_smem<M_TILES>::BLOCKS_PER_SM)
    cuda_decode_kernel(const __grid_constant__ decode_params params) {
    extern __shared__ __align__(128) uint8_t smem[];
    using layout = decode_smem<M_TILES>;
    const uint32_t ring = smem_address(smem + layout::FIXED);
    const uint32_t full_bar = smem_address(smem + layout::BARRIERS);
    const uint32_t empty_bar = full_bar + 8 * MAX_STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < params.num_stages; stage++) {
            mbarrier_init(full_bar + 8 * stage, 2 * 32 * layout::PRODUCER_WARPS);
            mbarrier_init(empty_bar + 8 * stage, CONSUMERS);
        }
    }
    __syncthreads();
    prefetch_plan(params);
    grid_dependency_wait();
    grid_dependency_launch(); /* from here on the reduce may read lengths and plan */

    const kbmla_work_walk walk = start_walk(params);
    if (threadIdx.x >= CONSUMERS)
        produce<M_TILES>(params, ring, full_bar, empty_bar, walk);
    else
        consume<M_TILES>(params, smem, ring, full_bar, empty_bar, walk);
}

/* ------------------------------------------------------------------ launch */

namespace {

struct decode_shape {
    int32_t m_tiles;
    int32_t blocks_per_cluster;
    int32_t blocks_per_sm;
    int32_t num_stages;
    int32_t threads;
    int32_t smem_bytes;
    const void *kernel;
};

template <int M_TILES> void fill_shape(decode_shape &shape) {
    shape.m_tiles = M_TILES;
    shape.threads = decode_smem<M_TILES>::THREADS;
    shape.blocks_per_sm = decode_smem<M_TILES>::BLOCKS_PER_SM;
    shape.smem_bytes = decode_smem<M_TILES>::FIXED;
    shape.kernel = reinterpret_cast<const void *>(cuda_decode_kernel<M_TILES>);
}

/* Rows per block, ring depth and blocks per SM for this card's shared memory. */
decode_shape choose_shape(int32_t q_tile_rows, const kbmla_cuda_device &device) {
    decode_shape shape = {};
    shape.blocks_per_cluster = kbmla_ceil_div(q_tile_rows, MAX_BLOCK_ROWS);
    const int32_t rows = kbmla_ceil_div(q_tile_rows, shape.blocks_per_cluster);
    if (rows <= 16)
        fill_shape<1>(shape);
    else
        fill_shape<2>(shape);
    /* Two small blocks on an SM hide each other's barriers where both rings can be two deep. */
    const int32_t reserved = 1024; /* per block, taken by the driver */
    int32_t half = device.smem_per_sm / 2 - reserved;
    if (half < shape.smem_bytes + 2 * STAGE_BYTES)
        shape.blocks_per_sm = 1;
    int32_t room = (shape.blocks_per_sm == 2 ? half : device.smem_per_block) - shape.smem_bytes;
    shape.num_stages = kbmla_min(kbmla_max(room / STAGE_BYTES, 1), MAX_STAGES);
    shape.smem_bytes += shape.num_stages * STAGE_BYTES;
    return shape;
}

} // namespace

extern "C" int32_t kbmla_cuda_decode_clusters(const kbmla_sizes *sizes,
                                              const kbmla_cuda_device *device) {
    decode_shape shape = choose_shape(sizes->q_tile_rows, *device);
    return kbmla_max(1, device->num_sms * shape.blocks_per_sm / shape.blocks_per_cluster);
}

extern "C" kbmla_status kbmla_cuda_decode_prepare(const kbmla_sizes *sizes,
                                                  const kbmla_cuda_device *device,
                                                  kbmla_error *err) {
    decode_shape shape = choose_shape(sizes->q_tile_rows, *device);
    CUDA_CHECK(cudaFuncSetAttribute(shape.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shape.smem_bytes),
               err);
    return KBMLA_OK;
}

extern "C" kbmla_status kbmla_cuda_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    kbmla_cuda_device device;
    FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
    decode_shape shape = choose_shape(sizes->q_tile_rows, device);
    decode_params params = make_decode_params(config, sizes, args);
    params.blocks_per_cluster = shape.blocks_per_cluster;
    params.block_rows = 16 * shape.m_tiles;
    params.num_stages = shape.num_stages;
    void *arguments[] = {&params};
    return kbmla_cuda_launch(shape.kernel, config->num_clusters * shape.blocks_per_cluster, 1,
                             shape.threads, shape.smem_bytes, args->pdl != 0 && device.has_pdl,
                             arguments, stream, err);
}
