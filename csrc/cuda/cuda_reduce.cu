/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merge of split requests, one kernel for every GPU backend: out = sum of w_i O_i / sum of w_i with
 * w_i = 2^(lse_i - max lse), per row.
 *
 * The grid knows nothing of the lengths: each block first lists the split requests (their counts
 * after normalisation, as decode saw them), those of up to 8 splits apart from the others. A row of
 * the former is a warp's, its splits summed in ascending order. The columns of a row of the others
 * are shared by 8 or 4 blocks where rows are few, else halved: team t of 16 lanes sums splits t,
 * t + 16, ... in ascending order, against the maximum over its warp's two teams, and the sixteen
 * sums are added in order. So a result depends neither on the number of blocks nor on what else is
 * in the step. Partials are loaded before their weights are known.
 *
 * Lengths and plan are read, and what a block's first task loads is found, before the wait for
 * decode. Decode triggers this launch only after its own wait, so the kernels that write them are
 * complete; alone, the reduce is launched without programmatic launch.
 */
#include "cuda_launch.h"
#include "cuda_ptx.cuh"

#include "../rules.h"

#include <cuda_bf16.h>

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    BLOCKS_PER_SM = 3,
    FEW = 8,                           /* splits of a row that are summed in order, by a warp */
    TEAMS = 2 * WARPS,                 /* ... of more by a block */
    LANES = 16,                        /* of a team */
    GROUP = 4,                         /* splits of a team that are skipped together */
    MAX_COLUMNS = KBMLA_HEAD_DIM_V / 2 /* of a row that a block sums at once */
};

struct reduce_params {
    kbmla_decode_args args;
    kbmla_sizes sizes;
    int32_t num_heads;
    int32_t tail;
    float output_scale;
};

/* A split request, as the blocks list them. */
struct split_request {
    int32_t base; /* its first slot; negative: not split */
    uint32_t batch : 10, planned : 9, count : 9;
};

struct reduce_smem {
    split_request
        requests[KBMLA_MAX_REQUESTS]; /* of few splits from the front, others from the end */
    uint32_t warp_listed[WARPS];      /* of few splits, and of more << 16 */
    float2 warp_stat[WARPS];          /* maximum, sum of weights */
    alignas(16) float team_sum[TEAMS * MAX_COLUMNS];
};

/* Past L1: it may hold older values, as nothing has been waited for yet. */
static __device__ __forceinline__ split_request find_request(const reduce_params &params,
                                                             int32_t batch) {
    const kbmla_decode_args &args = params.args;
    if (batch >= args.num_requests)
        return {-1, 0, 0, 0};
    const int32_t planned = __ldcg(args.counts + batch), length = __ldcg(args.lengths + batch);
    const int32_t element = __ldcg(args.work + params.tail + batch);
    /* A foreign plan may hold any count; slots that there are not are skipped. No && here, or the
     * loads would wait for one another. */
    if (!((planned > 1) & (planned <= KBMLA_MAX_SPLITS) & (element < 0) & (length > 0)))
        return {-1, 0, 0, 0};
    const int32_t tiles =
        kbmla_num_tiles(kbmla_clamp_length(length, args.max_pages * args.page_size));
    const int32_t count = kbmla_normalise_count(tiles, planned);
    const int32_t base =
        kbmla_checked_base(element, planned, params.sizes.num_q_tiles, params.sizes.max_partials);
    return {count > 1 ? base : -1, (uint32_t)batch, (uint32_t)planned, (uint32_t)count};
}

/* How many split requests there are of up to FEW splits (x) and of more (y). */
static __device__ __forceinline__ int2 list_requests(const reduce_params &params,
                                                     reduce_smem &smem) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
    const uint32_t below = (1u << lane) - 1;
    uint32_t listed = 0;
    for (int32_t first = 0; first < params.args.num_requests; first += THREADS) {
        const split_request request = find_request(params, first + (int32_t)thread);
        const bool is_split = request.base >= 0, is_few = is_split && request.count <= FEW;
        const uint32_t few = __ballot_sync(FULL_WARP, is_few);
        const uint32_t more = __ballot_sync(FULL_WARP, is_split && !is_few);
        if (lane == 0)
            smem.warp_listed[warp] = __popc(few) | __popc(more) << 16;
        __syncthreads();
        uint32_t at = listed + (__popc(few & below) | __popc(more & below) << 16);
        for (uint32_t w = 0; w < WARPS; w++) {
            at += w < warp ? smem.warp_listed[w] : 0;
            listed += smem.warp_listed[w];
        }
        if (is_split)
            smem.requests[is_few ? at & 0xFFFF : KBMLA_MAX_REQUESTS - 1 - (at >> 16)] = request;
        __syncthreads();
    }
    return make_int2(listed & 0xFFFF, listed >> 16);
}

template <typename T> struct alignas(4 * sizeof(T)) quad {
    T x[4];
};

/* A team's splits first, first + 1, ... of its `steps`, in groups, so that what is not there costs
 * nothing. For splits past the last, whose weight is 0, the last one is loaded. */
template <int BATCH, int VECTORS, typename T>
static __device__ __forceinline__ void load_batch(const T *partials, int32_t stride, int32_t team,
                                                  int32_t first, int32_t steps, int32_t count,
                                                  quad<T> (&x)[BATCH][VECTORS]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (i % GROUP == 0 && first + i >= steps)
            break;
        const int32_t split = kbmla_min(team + (first + i) * TEAMS, count - 1);
        const T *from = partials + split * stride; /* less than 2^24 */
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            x[i][v] = *reinterpret_cast<const quad<T> *>(from + 4 * LANES * v);
    }
}

/* Maximum over the lanes; NaN if one of them is. */
static __device__ __forceinline__ float lane_max(float value) {
    int32_t bits = __float_as_int(value != value ? NAN : value);
    bits ^= bits >> 31 & INT32_MAX; /* ordered as the floats are, NaN above all */
    bits = __reduce_max_sync(FULL_WARP, bits);
    return __int_as_float(bits ^ (bits >> 31 & INT32_MAX));
}

/* 2^(lse - top); 0 of a -inf. */
static __device__ __forceinline__ float weight_of(float lse, float top) {
    return exp2_approx(lse - (top == -INFINITY ? 0.0f : top));
}

/* A split of weight 0 is dropped by selection: its partial may be anything. */
template <int VECTORS, typename T>
static __device__ __forceinline__ void add_split(quad<float> (&sum)[VECTORS],
                                                 const quad<T> (&x)[VECTORS], float weight) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sum[v].x[c] =
                weight == 0.0f ? sum[v].x[c] : fmaf(weight, (float)x[v].x[c], sum[v].x[c]);
}

/* Row of the workspace of a request's row in its first split; others are a q tile's rows apart. */
static __device__ __forceinline__ int64_t first_partial(const reduce_params &params,
                                                        const split_request &request, int32_t row) {
    const int32_t tile_rows = params.sizes.q_tile_rows, q_tile = kbmla_div_small(row, tile_rows);
    const int64_t slot = kbmla_partial_slot(request.base, q_tile, (int32_t)request.planned, 0);
    return slot * tile_rows + row - q_tile * tile_rows;
}

static __device__ __forceinline__ const float *partial_lses(const reduce_params &params,
                                                            int64_t row) {
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(params.args.workspace) +
                                           params.sizes.partial_lse_offset) +
           row;
}

/* A row of a request of up to FEW splits, by a warp. A NaN lse makes the row NaN. */
template <typename T>
static __device__ __forceinline__ void
merge_few(const reduce_params &params, const split_request &request, int32_t row, int32_t lane) {
    constexpr int VECTORS = KBMLA_HEAD_DIM_V / 128, PAIR = 2; /* splits in flight */
    const kbmla_decode_args &args = params.args;
    const int32_t tile_rows = params.sizes.q_tile_rows, count = (int32_t)request.count;
    const int32_t batch = (int32_t)request.batch, stride = tile_rows * KBMLA_HEAD_DIM_V;
    const int64_t first_row = first_partial(params, request, row);
    /* Lane i has the weight of split i. */
    const float *own_lse = partial_lses(params, first_row) + lane * tile_rows;
    const T *partials =
        static_cast<const T *>(args.workspace) + first_row * KBMLA_HEAD_DIM_V + 4 * lane;
    const int64_t out_at = kbmla_out_row(&args, params.num_heads, batch, row) + 4 * lane;
    grid_dependency_wait_with(own_lse, partials, out_at);
    const float lse = lane < count ? *own_lse : -INFINITY;
    float top, weight, total = 0.0f;
    quad<T> x[PAIR][VECTORS];
    quad<float> sum[VECTORS] = {};
#pragma unroll
    for (int first = 0; first < FEW; first += PAIR) {
        if (first >= count)
            break;
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            const T *from = partials + kbmla_min(first + i, count - 1) * stride;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                x[i][v] = *reinterpret_cast<const quad<T> *>(from + 128 * v);
        }
        if (first == 0) {
            top = lane_max(lse);
            weight = weight_of(lse, top);
        }
#pragma unroll
        for (int i = 0; i < PAIR; i++) {
            const float w = __shfl_sync(FULL_WARP, weight, first + i);
            total += w;
            add_split(sum, x[i], w);
        }
    }
    const float scale = total == 0.0f ? 0.0f : __fdividef(params.output_scale, total);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        quad<__nv_bfloat16> merged;
#pragma unroll
        for (int c = 0; c < 4; c++)
            merged.x[c] = __float2bfloat16_rn(sum[v].x[c] * scale);
        *reinterpret_cast<quad<__nv_bfloat16> *>(args.out + out_at + 128 * v) = merged;
    }
    if (args.lse != NULL && lane == 0)
        args.lse[kbmla_lse_row(&args, params.num_heads, batch, row)] =
            total == 0.0f ? -INFINITY : top + log2f(total);
}

/* The rows of `num_requests` requests of more than FEW splits, each by COLUMN_BLOCKS blocks. */
template <int COLUMN_BLOCKS, typename T>
static __device__ __forceinline__ void merge_many(const reduce_params &params, reduce_smem &smem,
                                                  int32_t num_requests) {
    constexpr int COLUMNS = KBMLA_HEAD_DIM_V / COLUMN_BLOCKS;
    constexpr int VECTORS = COLUMNS / (4 * LANES); /* of 4 columns, in each lane */
    constexpr int BATCH = 8 / VECTORS;             /* splits of a team in flight */
    static_assert(COLUMNS <= MAX_COLUMNS, "the teams' sums have no place");
    const kbmla_decode_args &args = params.args;
    const int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
    const int32_t half = lane / LANES, team = warp + WARPS * half;
    const int32_t rows = params.sizes.rows, rows_per_tile = params.sizes.q_tile_rows;
    for (int32_t task = (int32_t)blockIdx.x; task < num_requests * rows * COLUMN_BLOCKS;
         task += (int32_t)gridDim.x) {
        const int32_t at = kbmla_div_small(task / COLUMN_BLOCKS, rows);
        const split_request request = smem.requests[KBMLA_MAX_REQUESTS - 1 - at];
        const int32_t count = (int32_t)request.count, column = task % COLUMN_BLOCKS * COLUMNS;
        const int32_t row = task / COLUMN_BLOCKS - at * rows, batch = (int32_t)request.batch;
        const int64_t first_row = first_partial(params, request, row);

        /* count <= 256: lane i of warp w has split w + 8 i. A NaN makes the row NaN. */
        const int32_t own = warp + lane * WARPS;
        const float *own_lse = partial_lses(params, first_row) + own * rows_per_tile;
        const int32_t stride = rows_per_tile * KBMLA_HEAD_DIM_V;
        const int32_t steps = (count - warp + TEAMS - 1) / TEAMS;
        const T *partials = static_cast<const T *>(args.workspace) + first_row * KBMLA_HEAD_DIM_V +
                            column + 4 * (lane % LANES);
        const int64_t out_at =
            kbmla_out_row(&args, params.num_heads, batch, row) + column + 2 * thread;
        grid_dependency_wait_with(own_lse, partials, out_at);
        const float lse = own < count ? *own_lse : -INFINITY;
        quad<T> x[BATCH][VECTORS];
        load_batch(partials, stride, team, 0, steps, count, x);
        const float top = lane_max(lse), weight = weight_of(lse, top);

        quad<float> sum[VECTORS] = {};
        float sum_weight = 0.0f;
        for (int32_t first = 0; first < steps; first += BATCH) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (i % GROUP == 0 && first + i >= steps)
                    break;
                const float w = __shfl_sync(FULL_WARP, weight, 2 * (first + i) + half);
                sum_weight += w;
                add_split(sum, x[i], w);
            }
            load_batch(partials, stride, team, first + BATCH, steps, count, x);
        }
        sum_weight += __shfl_xor_sync(FULL_WARP, sum_weight, LANES);
        if (lane == 0)
            smem.warp_stat[warp] = make_float2(top, sum_weight);
        if (team < count)
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                *reinterpret_cast<quad<float> *>(
                    &smem.team_sum[team * COLUMNS + 4 * (lane % LANES + LANES * v)]) = sum[v];
        __syncthreads();

        if (thread < COLUMNS / 2) { /* two columns each */
            float2 part[TEAMS], merged = {};
#pragma unroll
            for (int t = 0; t < TEAMS; t++)
                part[t] =
                    t < count
                        ? *reinterpret_cast<float2 *>(&smem.team_sum[t * COLUMNS + 2 * thread])
                        : make_float2(0.0f, 0.0f);
            float factor[WARPS], most = -INFINITY, total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                most = fmaxf(most, smem.warp_stat[w].x);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factor[w] = weight_of(smem.warp_stat[w].x, most);
                total = fmaf(factor[w], smem.warp_stat[w].y, total);
            }
#pragma unroll
            for (int t = 0; t < TEAMS; t++) {
                const float w = factor[t % WARPS];
                merged.x = w == 0.0f ? merged.x : fmaf(w, part[t].x, merged.x);
                merged.y = w == 0.0f ? merged.y : fmaf(w, part[t].y, merged.y);
            }
            const float scale = total == 0.0f ? 0.0f : __fdividef(params.output_scale, total);
            *reinterpret_cast<__nv_bfloat162 *>(args.out + out_at) =
                __floats2bfloat162_rn(merged.x * scale, merged.y * scale);
            if (args.lse != NULL && column == 0 && thread == 0)
                args.lse[kbmla_lse_row(&args, params.num_heads, batch, row)] =
                    total == 0.0f ? -INFINITY : most + log2f(total);
        }
        __syncthreads(); /* what the warps left for each other is the next task's */
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cuda_reduce_kernel(const __grid_constant__ reduce_params params) {
    __shared__ reduce_smem smem;
    const int32_t rows = params.sizes.rows, lane = (int32_t)threadIdx.x & 31,
                  warp = uniform((int32_t)threadIdx.x >> 5), blocks = (int32_t)gridDim.x;
    grid_dependency_launch();
    const int2 listed = list_requests(params, smem);

    /* One warp of each block before a second of any: few rows then have the loads of many SMs. From
     * the last block on, as the first ones have the rows of more splits. */
    for (int32_t at = warp * blocks + blocks - 1 - (int32_t)blockIdx.x; at < listed.x * rows;
         at += WARPS * blocks) {
        const int32_t request_at = kbmla_div_small(at, rows);
        const split_request request = smem.requests[request_at];
        merge_few<T>(params, request, at - request_at * rows, lane);
    }
    const int32_t more_rows = listed.y * rows;
    if (8 * more_rows <= blocks)
        merge_many<8, T>(params, smem, listed.y);
    else if (2 * more_rows <= blocks)
        merge_many<4, T>(params, smem, listed.y);
    else
        merge_many<2, T>(params, smem, listed.y);
    /* Of blocks without a row: the grid must not end before decode does. */
    grid_dependency_wait();
}

static const void *reduce_kernel(int32_t partial_fp16) {
    return partial_fp16 ? reinterpret_cast<const void *>(cuda_reduce_kernel<__half>)
                        : reinterpret_cast<const void *>(cuda_reduce_kernel<float>);
}

extern "C" kbmla_status kbmla_cuda_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    kbmla_cuda_device device;
    FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
    reduce_params params = {*args, *sizes, config->num_heads,
                            sizes->list_len - config->max_requests, (float)args->output_scale};
    /* Column blocks of what can be split, at most. */
    const int32_t rows = kbmla_min(sizes->max_extra, args->num_requests) * sizes->rows;
    const int32_t blocks = kbmla_max(1, kbmla_min(8 * rows, device.num_sms * BLOCKS_PER_SM));
    void *arguments[] = {&params};
    return kbmla_cuda_launch(reduce_kernel(config->partial_fp16), blocks, 1, THREADS, 0,
                             args->pdl != 0 && device.has_pdl, arguments, stream, err);
}
