/*
 * Merge of split requests, one kernel for every GPU backend: out = sum of w_i O_i / sum of w_i with
 * w_i = 2^(lse_i - max lse), per row and in blocks of the 512 columns.
 *
 * The grid knows nothing of the lengths: each block first lists the split requests (their counts
 * after normalisation, as decode saw them), then takes (row, columns) pairs of these, a grid apart.
 * Up to 8 splits are summed in ascending order. Of more, team t of 16 lanes sums splits t, t + 16,
 * ... in ascending order, against the maximum over its warp's two teams, and the sixteen sums are
 * added in order: a result depends neither on the number of blocks nor on their columns. Partials
 * are loaded before their weights are known, and what a task needs of its index is worked out while
 * others wait for memory.
 */
#include "cuda_launch.h"
#include "cuda_ptx.cuh"

#include "../rules.h"

#include <cuda_bf16.h>

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    FEW = 8,           /* splits of a row that are summed in order, by a warp where rows are many */
    TEAMS = 2 * WARPS, /* ... of more by a block */
    LANES = 16,        /* of a team */
    GROUP = 4          /* splits of a team that are skipped together */
};

/* The columns of a row are shared by COLUMN_BLOCKS blocks: by several where rows are so few that
 * SMs would idle; such a block has up to all of a much split row in flight at once. */
static constexpr int blocks_per_sm(int column_blocks) {
    return column_blocks == 1 ? 3 : 2;
}

struct reduce_params {
    kbmla_decode_args args;
    kbmla_sizes sizes;
    int32_t num_heads;
    int32_t tail;
    float output_scale;
};

/* A row of the split requests, and which of its column blocks. */
struct reduce_task {
    int32_t request, q_tile, tile_row, token, head, block;
};

static __device__ __forceinline__ reduce_task make_task(const reduce_params &params, int32_t index,
                                                        int32_t column_blocks) {
    const kbmla_sizes &sizes = params.sizes;
    reduce_task task;
    int32_t row = index / column_blocks;
    task.block = index % column_blocks;
    task.request = kbmla_div(row, sizes.rows);
    row -= task.request * sizes.rows;
    task.q_tile = kbmla_div(row, sizes.q_tile_rows);
    task.tile_row = row - task.q_tile * sizes.q_tile_rows;
    task.token = kbmla_div(row, params.num_heads);
    task.head = row - task.token * params.num_heads;
    return task;
}

/* A split request, as the blocks list them. */
struct split_request {
    int32_t base; /* its first slot; negative: not split */
    uint32_t batch : 10, planned : 9, count : 9;
};

static __device__ __forceinline__ split_request find_request(const reduce_params &params,
                                                             int32_t batch, int64_t max_tokens) {
    if (batch >= params.args.num_requests)
        return {-1, 0, 0, 0};
    const int32_t planned = params.args.counts[batch], length = params.args.lengths[batch];
    const int32_t element = params.args.work[params.tail + batch];
    /* A foreign plan may hold any count; slots that there are not are skipped. No && here, or the
     * loads would wait for one another. */
    if (!((planned > 1) & (planned <= KBMLA_MAX_SPLITS) & (element < 0) & (length > 0)))
        return {-1, 0, 0, 0};
    const int32_t tiles = kbmla_num_tiles(kbmla_clamp_length(length, max_tokens));
    const int32_t count = kbmla_normalise_count(tiles, planned);
    const int32_t base =
        kbmla_checked_base(element, planned, params.sizes.num_q_tiles, params.sizes.max_partials);
    return {count > 1 ? base : -1, (uint32_t)batch, (uint32_t)planned, (uint32_t)count};
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

/* Where the partials of a row begin, and where it goes. */
struct reduce_row {
    int64_t first; /* row of the workspace; its splits are a q tile's rows apart */
    int64_t out_at;
    int64_t lse_at;
};

static __device__ __forceinline__ reduce_row find_row(const reduce_params &params,
                                                      const split_request &request,
                                                      const reduce_task &task) {
    const kbmla_decode_args &args = params.args;
    const int32_t batch = (int32_t)request.batch;
    const int64_t slot = kbmla_partial_slot(request.base, task.q_tile, (int32_t)request.planned, 0);
    return {slot * params.sizes.q_tile_rows + task.tile_row,
            batch * args.out_batch_stride + task.token * args.out_token_stride +
                task.head * args.out_head_stride,
            batch * args.lse_batch_stride + task.token * args.lse_token_stride +
                task.head * args.lse_head_stride};
}

static __device__ __forceinline__ const float *partial_lses(const reduce_params &params,
                                                            const reduce_row &row) {
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(params.args.workspace) +
                                           params.sizes.partial_lse_offset) +
           row.first;
}

/* A row of `count` <= FEW splits, by lanes that have 4 columns from `column` on and every 128 after
 * them. A NaN lse makes the row NaN. */
template <int VECTORS, typename T>
static __device__ __forceinline__ void merge_few(const reduce_params &params, const reduce_row &row,
                                                 int32_t count, int32_t column, bool writes_lse) {
    const kbmla_decode_args &args = params.args;
    const int32_t tile_rows = params.sizes.q_tile_rows;
    const float *lse = partial_lses(params, row);
    const T *from = static_cast<const T *>(args.workspace) + row.first * KBMLA_HEAD_DIM_V + column;
    float weight[FEW], most = -INFINITY, total = 0.0f;
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < FEW; i++)
        weight[i] = i < count ? lse[i * tile_rows] : -INFINITY;
#pragma unroll
    for (int i = 0; i < FEW; i++) {
        most = fmaxf(most, weight[i]);
        is_nan = is_nan || weight[i] != weight[i];
    }
#pragma unroll
    for (int i = 0; i < FEW; i++)
        weight[i] = is_nan ? NAN : weight_of(weight[i], most);
    quad<float> sum[VECTORS] = {};
#pragma unroll
    for (int first = 0; first < FEW; first += 2) {
        if (first >= count)
            break;
        quad<T> x[2][VECTORS];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                x[i][v] = *reinterpret_cast<const quad<T> *>(
                    from + kbmla_min(first + i, count - 1) * tile_rows * KBMLA_HEAD_DIM_V +
                    128 * v);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total += weight[first + i];
            add_split(sum, x[i], weight[first + i]);
        }
    }
    const float scale = total == 0.0f ? 0.0f : __fdividef(params.output_scale, total);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        quad<__nv_bfloat16> merged;
#pragma unroll
        for (int c = 0; c < 4; c++)
            merged.x[c] = __float2bfloat16_rn(sum[v].x[c] * scale);
        *reinterpret_cast<quad<__nv_bfloat16> *>(args.out + row.out_at + column + 128 * v) = merged;
    }
    if (writes_lse)
        args.lse[row.lse_at] = total == 0.0f ? -INFINITY : most + log2f(total);
}

template <int COLUMN_BLOCKS, typename T>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(COLUMN_BLOCKS))
    cuda_reduce_kernel(const __grid_constant__ reduce_params params) {
    constexpr int COLUMNS = KBMLA_HEAD_DIM_V / COLUMN_BLOCKS;
    constexpr int VECTORS = COLUMNS / (4 * LANES);               /* of 4 columns, in each lane */
    constexpr int BATCH = COLUMN_BLOCKS == 1 ? 1 : 16 / VECTORS; /* splits of a team in flight */
    __shared__ split_request requests[KBMLA_MAX_REQUESTS];       /* ascending */
    __shared__ int32_t warp_total[WARPS];
    __shared__ float2 warp_stat[WARPS]; /* maximum, sum of weights */
    __shared__ __align__(16) float team_sum[TEAMS][COLUMNS];
    const kbmla_decode_args &args = params.args;
    const int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
    const int32_t half = lane / LANES, team = warp + WARPS * half;
    const int32_t rows_per_tile = params.sizes.q_tile_rows;
    const int64_t max_tokens = args.max_pages * args.page_size;
    reduce_task task = make_task(params, (int32_t)blockIdx.x, COLUMN_BLOCKS);

    grid_dependency_launch();
    grid_dependency_wait();

    int32_t num_split = 0;
    for (int32_t first = 0; first < args.num_requests; first += THREADS) {
        const split_request request = find_request(params, first + thread, max_tokens);
        const bool is_split = request.base >= 0;
        const uint32_t ballot = __ballot_sync(FULL_WARP, is_split);
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

    if (COLUMN_BLOCKS == 1) {
        /* Rows of few splits, a warp each; the blocks below pass over them. */
        for (int32_t at = (int32_t)blockIdx.x * WARPS + warp;; at += (int32_t)gridDim.x * WARPS) {
            const reduce_task few = make_task(params, at, 1);
            if (few.request >= num_split)
                break;
            const split_request request = requests[few.request];
            if (request.count <= FEW)
                merge_few<4, T>(params, find_row(params, request, few), (int32_t)request.count,
                                4 * lane, args.lse != NULL && lane == 0);
        }
    }

    for (int32_t next = (int32_t)(blockIdx.x + gridDim.x); task.request < num_split;
         next += (int32_t)gridDim.x) {
        const split_request request = requests[task.request];
        const int32_t count = (int32_t)request.count, column = task.block * COLUMNS;
        const reduce_row row = find_row(params, request, task);
        const bool writes_lse = args.lse != NULL && task.block == 0 && thread == 0;
        task = make_task(params, next, COLUMN_BLOCKS);
        if (count <= FEW) {
            if (COLUMN_BLOCKS > 1 && thread < COLUMNS / 4)
                merge_few<1, T>(params, row, count, column + 4 * thread, writes_lse);
            continue;
        }

        /* count <= 256: lane i of warp w has split w + 8 i. A NaN makes the row NaN. */
        const int32_t own = warp + lane * WARPS;
        const float lse = own < count ? partial_lses(params, row)[own * rows_per_tile] : -INFINITY;
        const int32_t stride = rows_per_tile * KBMLA_HEAD_DIM_V;
        const int32_t steps = (count - warp + TEAMS - 1) / TEAMS;
        const T *partials = static_cast<const T *>(args.workspace) + row.first * KBMLA_HEAD_DIM_V +
                            column + 4 * (lane % LANES);
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
            if (BATCH * TEAMS < KBMLA_MAX_SPLITS)
                load_batch(partials, stride, team, first + BATCH, steps, count, x);
        }
        sum_weight += __shfl_xor_sync(FULL_WARP, sum_weight, LANES);
        if (lane == 0)
            warp_stat[warp] = make_float2(top, sum_weight);
        if (team < count)
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                *reinterpret_cast<quad<float> *>(&team_sum[team][4 * (lane % LANES + LANES * v)]) =
                    sum[v];
        __syncthreads();

        if (thread < COLUMNS / 2) { /* two columns each */
            float2 part[TEAMS], merged = {};
#pragma unroll
            for (int t = 0; t < TEAMS; t++)
                part[t] = t < count ? *reinterpret_cast<float2 *>(&team_sum[t][2 * thread])
                                    : make_float2(0.0f, 0.0f);
            float factor[WARPS], most = -INFINITY, total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                most = fmaxf(most, warp_stat[w].x);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factor[w] = weight_of(warp_stat[w].x, most);
                total = fmaf(factor[w], warp_stat[w].y, total);
            }
#pragma unroll
            for (int t = 0; t < TEAMS; t++) {
                const float w = factor[t % WARPS];
                merged.x = w == 0.0f ? merged.x : fmaf(w, part[t].x, merged.x);
                merged.y = w == 0.0f ? merged.y : fmaf(w, part[t].y, merged.y);
            }
            const float scale = total == 0.0f ? 0.0f : __fdividef(params.output_scale, total);
            *reinterpret_cast<__nv_bfloat162 *>(args.out + row.out_at + column + 2 * thread) =
                __floats2bfloat162_rn(merged.x * scale, merged.y * scale);
            if (writes_lse)
                args.lse[row.lse_at] = total == 0.0f ? -INFINITY : most + log2f(total);
        }
        __syncthreads(); /* what the warps left for each other is the next task's */
    }
}

template <int COLUMN_BLOCKS> static const void *reduce_kernel(int32_t partial_fp16) {
    return partial_fp16 ? reinterpret_cast<const void *>(cuda_reduce_kernel<COLUMN_BLOCKS, __half>)
                        : reinterpret_cast<const void *>(cuda_reduce_kernel<COLUMN_BLOCKS, float>);
}

extern "C" kbmla_status kbmla_cuda_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    kbmla_cuda_device device;
    FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
    reduce_params params = {*args, *sizes, config->num_heads,
                            sizes->list_len - config->max_requests, (float)args->output_scale};
    /* Rows of what can be split, at most; their columns are shared where one wave takes all. */
    const int32_t rows = kbmla_min(sizes->max_extra, args->num_requests) * sizes->rows;
    const int32_t wave = device.num_sms * blocks_per_sm(1);
    const void *kernel = reduce_kernel<1>(config->partial_fp16);
    int32_t blocks = kbmla_max(1, kbmla_min(rows, wave));
    if (8 * rows <= device.num_sms) {
        kernel = reduce_kernel<8>(config->partial_fp16);
        blocks *= 8;
    } else if (2 * rows <= device.num_sms && config->reducer_d_tiles == 2) {
        kernel = reduce_kernel<4>(config->partial_fp16);
        blocks *= 4;
    }
    void *arguments[] = {&params};
    return kbmla_cuda_launch(kernel, blocks, THREADS, 0, args->pdl != 0 && device.has_pdl,
                             arguments, stream, err);
}
