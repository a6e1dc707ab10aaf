/*
 * Merge of split requests, one kernel for every GPU backend: out = sum of w_i O_i / sum of w_i with
 * w_i = 2^(lse_i - max lse), per row and in blocks of the 512 columns.
 *
 * The grid is fixed and knows nothing of the lengths: each block first lists the split requests
 * (their counts after normalisation, as decode saw them), then takes (row, columns) pairs of these,
 * a grid apart. Within a block warp w sums splits w, w + 8, ... in ascending order and warp 0's
 * threads add the eight sums in order, so a result depends neither on the number of blocks nor on
 * the columns of a block. The first partials are loaded before the weights are known.
 */
#include "cuda_launch.h"
#include "cuda_ptx.cuh"

#include "../rules.h"

#include <cuda_bf16.h>

enum { WARPS = 8, THREADS = 32 * WARPS };

/* One band of 512 columns per row, or, for few rows, two of 256, each shared by two blocks: a block
 * of a much split row then reads 64 KB, not 262, with all of a warp's loads in flight at once. */
template <int COLUMN_BLOCKS> struct reduce_shape {
    enum {
        BLOCKS_PER_SM = COLUMN_BLOCKS == 1 ? 3 : 2,
        BATCH = COLUMN_BLOCKS == 1 ? 2 : 16,
        COLUMNS = KBMLA_HEAD_DIM_V / COLUMN_BLOCKS,
        VECTORS = COLUMNS / 128 /* of 4 columns, in each lane */
    };
};

struct reduce_params {
    kbmla_decode_args args;
    kbmla_sizes sizes;
    int32_t num_heads;
    int32_t tail;
    int32_t partial_fp16;
    float output_scale;
};

/* Four columns of a partial row. */
static __device__ __forceinline__ float4 load_partial(const reduce_params &params, int64_t slot_row,
                                                      int32_t column) {
    int64_t at = slot_row * KBMLA_HEAD_DIM_V + column;
    if (!params.partial_fp16)
        return *reinterpret_cast<const float4 *>(static_cast<const float *>(params.args.workspace) +
                                                 at);
    uint2 bits =
        *reinterpret_cast<const uint2 *>(static_cast<const __half *>(params.args.workspace) + at);
    float2 low = __half22float2(*reinterpret_cast<__half2 *>(&bits.x));
    float2 high = __half22float2(*reinterpret_cast<__half2 *>(&bits.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

/* The partials of splits first, first + WARPS, ... of a row; those past `count` are left alone. */
template <int BATCH, int VECTORS>
static __device__ __forceinline__ void
load_batch(const reduce_params &params, int64_t first_row, int32_t rows_per_tile, int32_t column,
           int32_t first, int32_t count, float4 (&x)[BATCH][VECTORS]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int32_t split = first + i * WARPS;
        if (split < count) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                x[i][v] = load_partial(params, first_row + (int64_t)split * rows_per_tile,
                                       column + 128 * v);
        }
    }
}

/* A split request, as the blocks list them: its first slot, and batch, planned and normalised
 * counts packed (10, 9 and 9 bits). */
struct split_request {
    int32_t base;
    uint32_t packed;
};

static __device__ __forceinline__ split_request pack_request(int32_t base, int32_t batch,
                                                             int32_t planned, int32_t count) {
    return {base, (uint32_t)batch << 18 | (uint32_t)planned << 9 | (uint32_t)count};
}

template <int COLUMN_BLOCKS>
static __global__ void __launch_bounds__(THREADS, reduce_shape<COLUMN_BLOCKS>::BLOCKS_PER_SM)
    cuda_reduce_kernel(const __grid_constant__ reduce_params params) {
    using shape = reduce_shape<COLUMN_BLOCKS>;
    constexpr int BATCH = shape::BATCH, VECTORS = shape::VECTORS;
    __shared__ split_request requests[KBMLA_MAX_REQUESTS]; /* ascending */
    __shared__ int32_t warp_total[WARPS];
    __shared__ float weight[KBMLA_MAX_SPLITS];
    __shared__ float warp_stat[WARPS];
    __shared__ float warp_weight[WARPS];
    __shared__ float4 warp_sum[WARPS][VECTORS][32];
    const kbmla_decode_args &args = params.args;
    const int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;

    grid_dependency_launch();
    grid_dependency_wait();

    int32_t num_split = 0;
    const int64_t max_tokens = args.max_pages * args.page_size;
    for (int32_t first = 0; first < args.num_requests; first += THREADS) {
        int32_t batch = first + thread;
        split_request request = {-1, 0};
        if (batch < args.num_requests) {
            /* Loaded at once, whether needed or not: one latency instead of two. */
            int32_t planned = args.counts[batch], element = args.work[params.tail + batch];
            int32_t length = args.lengths[batch];
            /* A foreign plan may hold any count; slots that there are not are skipped. */
            if (planned > 1 && planned <= KBMLA_MAX_SPLITS) {
                int32_t tiles = kbmla_num_tiles(kbmla_clamp_length(length, max_tokens));
                int32_t count = kbmla_normalise_count(tiles, planned);
                if (count > 1)
                    request =
                        pack_request(kbmla_checked_base(element, planned, params.sizes.num_q_tiles,
                                                        params.sizes.max_partials),
                                     batch, planned, count);
            }
        }
        const bool is_split = request.base >= 0;
        uint32_t ballot = __ballot_sync(0xFFFFFFFFu, is_split);
        if (lane == 0)
            warp_total[warp] = __popc(ballot);
        __syncthreads();
        int32_t at = num_split + __popc(ballot & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            at += w < warp ? warp_total[w] : 0;
            num_split += warp_total[w];
        }
        if (is_split)
            requests[at] = request;
        __syncthreads();
    }

    const int32_t rows = params.sizes.rows, rows_per_tile = params.sizes.q_tile_rows;
    const float *partial_lse = reinterpret_cast<const float *>(
        static_cast<const uint8_t *>(args.workspace) + params.sizes.partial_lse_offset);
    for (int32_t task = (int32_t)blockIdx.x; task < num_split * rows * COLUMN_BLOCKS;
         task += (int32_t)gridDim.x) {
        const int32_t block = task % COLUMN_BLOCKS, row = task / COLUMN_BLOCKS % rows;
        const split_request request = requests[task / COLUMN_BLOCKS / rows];
        const int32_t batch = (int32_t)(request.packed >> 18);
        const int32_t planned = (int32_t)(request.packed >> 9 & 511);
        const int32_t count = (int32_t)(request.packed & 511);
        const int64_t first_row =
            (int64_t)kbmla_partial_slot(request.base, row / rows_per_tile, planned, 0) *
                rows_per_tile +
            row % rows_per_tile;

        const int32_t column = block * shape::COLUMNS + 4 * lane;
        float4 x[BATCH][VECTORS] = {};
        load_batch<BATCH, VECTORS>(params, first_row, rows_per_tile, column, warp, count, x);

        /* count <= 256 = THREADS: thread i holds split i. A NaN lse makes the row NaN. */
        float lse =
            thread < count ? partial_lse[first_row + (int64_t)thread * rows_per_tile] : -INFINITY;
        float top = lse;
        bool is_nan = lse != lse;
        for (int step = 16; step > 0; step >>= 1)
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
        if (lane == 0)
            warp_stat[warp] = top;
        is_nan = __syncthreads_or(is_nan);
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, warp_stat[w]);
        const float shift = top == -INFINITY ? 0.0f : top;
        if (thread < count)
            weight[thread] = is_nan ? NAN : exp2f(lse - shift);
        __syncthreads();

        /* A split of weight 0 is dropped by selection: its partial may be anything. */
        float4 sum[VECTORS] = {};
        float sum_weight = 0.0f;
        for (int32_t first = warp; first < count; first += BATCH * WARPS) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int32_t split = first + i * WARPS;
                const float w = split < count ? weight[split] : 0.0f;
                sum_weight += w;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    sum[v].x = w == 0.0f ? sum[v].x : fmaf(w, x[i][v].x, sum[v].x);
                    sum[v].y = w == 0.0f ? sum[v].y : fmaf(w, x[i][v].y, sum[v].y);
                    sum[v].z = w == 0.0f ? sum[v].z : fmaf(w, x[i][v].z, sum[v].z);
                    sum[v].w = w == 0.0f ? sum[v].w : fmaf(w, x[i][v].w, sum[v].w);
                }
            }
            load_batch<BATCH, VECTORS>(params, first_row, rows_per_tile, column,
                                       first + BATCH * WARPS, count, x);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            warp_sum[warp][v][lane] = sum[v];
        if (lane == 0)
            warp_weight[warp] = sum_weight;
        __syncthreads();

        float total = 0.0f;
        for (int w = 0; w < WARPS; w++)
            total += warp_weight[w];
        const int32_t token = row / params.num_heads, head = row % params.num_heads;
        if (warp < VECTORS) {
            float4 merged = warp_sum[0][warp][lane];
            for (int w = 1; w < WARPS; w++) {
                float4 x = warp_sum[w][warp][lane];
                merged.x += x.x;
                merged.y += x.y;
                merged.z += x.z;
                merged.w += x.w;
            }
            const float scale = total == 0.0f ? 0.0f : params.output_scale / total;
            __nv_bfloat162 low = __floats2bfloat162_rn(merged.x * scale, merged.y * scale);
            __nv_bfloat162 high = __floats2bfloat162_rn(merged.z * scale, merged.w * scale);
            __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(args.out) +
                                batch * args.out_batch_stride + token * args.out_token_stride +
                                head * args.out_head_stride + column + 128 * warp;
            *reinterpret_cast<uint2 *>(to) = make_uint2(*reinterpret_cast<uint32_t *>(&low),
                                                        *reinterpret_cast<uint32_t *>(&high));
        }
        if (args.lse != NULL && block == 0 && thread == 0)
            args.lse[batch * args.lse_batch_stride + token * args.lse_token_stride +
                     head * args.lse_head_stride] = total == 0.0f ? -INFINITY : top + log2f(total);
        __syncthreads(); /* weight and warp_sum are the next task's */
    }
}

extern "C" kbmla_status kbmla_cuda_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    kbmla_cuda_device device;
    FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
    reduce_params params;
    params.args = *args;
    params.sizes = *sizes;
    params.num_heads = config->num_heads;
    params.tail = sizes->list_len - config->max_requests;
    params.partial_fp16 = config->partial_fp16;
    params.output_scale = (float)args->output_scale;
    const bool is_wide = config->reducer_d_tiles == 2 &&
                         (int64_t)args->num_requests * sizes->rows * 4 <= 2 * device.num_sms;
    const void *kernel = is_wide ? reinterpret_cast<const void *>(cuda_reduce_kernel<4>)
                                 : reinterpret_cast<const void *>(cuda_reduce_kernel<1>);
    const int32_t wave = device.num_sms * (is_wide ? (int32_t)reduce_shape<4>::BLOCKS_PER_SM
                                                   : (int32_t)reduce_shape<1>::BLOCKS_PER_SM);
    /* No wider than what can be split has rows. */
    const int64_t most =
        (int64_t)kbmla_min(sizes->max_extra, args->num_requests) * sizes->rows * (is_wide ? 4 : 1);
    void *arguments[] = {&params};
    return kbmla_cuda_launch(kernel, most < wave ? kbmla_max(1, (int32_t)most) : wave, THREADS, 0,
                             args->pdl != 0 && device.has_pdl, arguments, stream, err);
}
