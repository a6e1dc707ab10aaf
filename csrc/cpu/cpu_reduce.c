/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reduce on the CPU: partial outputs of split requests, weighted by their share of the row's
 * exponentials, to the final output and lse.
 *
 * Every row is summed over its splits in ascending order with weights exp2(lse - largest lse). A
 * split in which the row saw nothing has lse -inf and is skipped without its output being read,
 * for the workspace is never cleared. NaN partials of a request stay NaN.
 *
 * Requests with one split were finished by the decode and are left alone, as are requests whose
 * slots a foreign plan placed outside the workspace.
 */
#include <math.h>
#include <stddef.h>

#include "../e4m3.h"
#include "../internal.h"

enum { ROW_BLOCK = 16 }; /* rows of one unit of parallel work: 32 KiB per split */

typedef struct reduce_job {
    const kbmla_config *config;
    const kbmla_sizes *sizes;
    const kbmla_decode_args *args;
    int32_t num_row_blocks; /* of a request */
} reduce_job;

/* sum[512] += weight * row `row` of the partial outputs. */
static void add_partial(const reduce_job *job, int64_t row, float weight, float *sum) {
    if (job->config->partial_fp16) {
        const uint16_t *out = (const uint16_t *)job->args->workspace + row * KBMLA_HEAD_DIM_V;
        for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
            sum[d] += weight * kbmla_fp16_to_float(out[d]);
    } else {
        const float *out = (const float *)job->args->workspace + row * KBMLA_HEAD_DIM_V;
        for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
            sum[d] += weight * out[d];
    }
}

/* Merges one row of a request; its splits lie `q_tile_rows` rows apart from `first` on. */
static void reduce_row(const reduce_job *job, int32_t batch, int32_t row, int64_t first,
                       int32_t num_splits) {
    const kbmla_decode_args *args = job->args;
    const int32_t stride = job->sizes->q_tile_rows;
    const float *lse = (const float *)(const void *)((const char *)args->workspace +
                                                     job->sizes->partial_lse_offset) +
                       first;

    /* Ignores NaN; the weights below carry it. */
    float largest = -INFINITY;
    for (int32_t i = 0; i < num_splits; i++)
        largest = lse[(int64_t)i * stride] > largest ? lse[(int64_t)i * stride] : largest;

    float sum[KBMLA_HEAD_DIM_V] = {0};
    float weights = 0.0f;
    for (int32_t i = 0; i < num_splits; i++) {
        float split_lse = lse[(int64_t)i * stride];
        if (split_lse == -INFINITY)
            continue;
        float weight = exp2f(split_lse - largest);
        weights += weight;
        add_partial(job, first + (int64_t)i * stride, weight, sum);
    }

    const int32_t num_heads = job->config->num_heads;
    uint16_t *out = args->out + kbmla_out_row(args, num_heads, batch, row);
    float factor = weights == 0.0f ? 0.0f : (float)(args->output_scale / (double)weights);
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
        out[d] = kbmla_float_to_bf16(sum[d] * factor);
    if (args->lse != NULL)
        args->lse[kbmla_lse_row(args, num_heads, batch, row)] =
            weights == 0.0f ? -INFINITY : (float)((double)largest + log2((double)weights));
}

/* kbmla_parallel_body over blocks of rows, request by request. */
static void run_blocks(int64_t begin, int64_t end, void *context) {
    const reduce_job *job = (const reduce_job *)context;
    const kbmla_sizes *sizes = job->sizes;
    for (int64_t unit = begin; unit < end; unit++) {
        int32_t batch = (int32_t)(unit / job->num_row_blocks);
        int32_t first_row = (int32_t)(unit % job->num_row_blocks) * ROW_BLOCK;
        int32_t end_row = kbmla_min(first_row + ROW_BLOCK, sizes->rows);

        int32_t tiles = kbmla_num_tiles(kbmla_readable_length(job->args, batch));
        int32_t planned_count = job->args->counts[batch];
        int32_t num_splits = kbmla_normalise_count(tiles, planned_count);
        if (num_splits == 1)
            continue;
        int32_t base =
            kbmla_partial_base(job->config, sizes, job->args->work, batch, planned_count);
        if (base < 0)
            continue;
        for (int32_t row = first_row; row < end_row; row++) {
            int32_t q_tile = row / sizes->q_tile_rows;
            int64_t slot = kbmla_partial_slot(base, q_tile, planned_count, 0);
            reduce_row(job, batch, row, slot * sizes->q_tile_rows + row % sizes->q_tile_rows,
                       num_splits);
        }
    }
}

kbmla_status kbmla_cpu_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                              const kbmla_decode_args *args, struct CUstream_st *stream,
                              kbmla_error *err) {
    (void)stream;
    (void)err;
    reduce_job job = {config, sizes, args, kbmla_ceil_div(sizes->rows, ROW_BLOCK)};
    int64_t count = (int64_t)args->num_requests * job.num_row_blocks;
    if (args->parallel_for != NULL)
        args->parallel_for(count, run_blocks, &job, args->parallel_pool);
    else
        run_blocks(0, count, &job);
    return KBMLA_OK;
}
