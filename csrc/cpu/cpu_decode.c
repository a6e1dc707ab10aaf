/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Split-KV decode on the CPU: the walk over the work list, the page table, and the output of each
 * item. The arithmetic of a tile is in cpu_tile_impl.h.
 *
 * One cluster of the plan is one unit of parallel work. An item reads its 128-key tiles through the
 * block table into a contiguous copy that ends with the last key that any of its rows sees, so
 * nothing beyond a request's bound is ever read. An unsplit request is finished here; a split one
 * leaves FP32 or FP16 partials in the workspace for cpu_reduce.c.
 *
 * Relies on arguments that kbmla.c has validated, but not on the plan: an entry that does not fit
 * the arguments is skipped. Items write disjoint memory and an item's result does not depend on
 * its thread. All scratch is on the stack of the thread.
 */
#include <math.h>
#include <string.h>

#include "../e4m3.h"
#include "../internal.h"
#include "../scheduler.h"
#include "cpu_isa.h"
#include "cpu_tile.h"

typedef struct decode_job {
    const kbmla_config *config;
    const kbmla_sizes *sizes;
    const kbmla_decode_args *args;
    const kbmla_cpu_kernels *kernels;
    kbmla_cpu_softmax softmax;
    kbmla_context_parallel cp;
} decode_job;

/* An entry that has been checked against the arguments. */
typedef struct decode_item {
    int32_t batch;
    int32_t first_row; /* of the q tile, within the request */
    int32_t rows;
    int32_t first_key;
    int32_t end_key;
    int32_t slot; /* of the workspace; -1: the request is not split */
} decode_item;

/* ------------------------------------------------------------------ work list */

/* Makes an item of a tile of the walk; 0 if the tile does not belong to these arguments. */
static int make_item(const decode_job *job, kbmla_tile work, decode_item *item) {
    const kbmla_decode_args *args = job->args;
    const kbmla_sizes *sizes = job->sizes;
    if (work.q_tile >= sizes->num_q_tiles)
        return 0;

    int32_t length = kbmla_readable_length(args, work.batch);
    int32_t planned_count = args->counts[work.batch];
    kbmla_split_range range =
        kbmla_split_bounds(kbmla_num_tiles(length), planned_count, work.split);
    if (work.split >= range.count)
        return 0;

    item->batch = work.batch;
    item->first_row = work.q_tile * sizes->q_tile_rows;
    item->rows = kbmla_tile_valid_rows(sizes->rows, sizes->q_tile_rows, work.q_tile);
    item->first_key = range.begin_tile * KBMLA_TILE_TOKENS;
    item->end_key =
        range.end_tile < kbmla_num_tiles(length) ? range.end_tile * KBMLA_TILE_TOKENS : length;
    item->slot = -1;
    if (range.count > 1) {
        int32_t base =
            kbmla_partial_base(job->config, sizes, args->work, work.batch, planned_count);
        if (base < 0)
            return 0;
        item->slot = kbmla_partial_slot(base, work.q_tile, planned_count, work.split);
    }
    return 1;
}

/* ------------------------------------------------------------------ inputs */

/* Widens the query rows, finds how many keys each sees, and clears the running sums. Returns the
 * most keys that any row sees. */
static int32_t load_rows(const decode_job *job, const decode_item *item,
                         kbmla_cpu_scratch *scratch) {
    const kbmla_decode_args *args = job->args;
    const int32_t num_heads = job->config->num_heads;
    const int32_t length = kbmla_readable_length(args, item->batch);
    const int32_t total = args->causal_lens != NULL ? args->causal_lens[item->batch] : length;
    int32_t most = 0;
    for (int32_t i = 0; i < item->rows; i++) {
        const int32_t row = item->first_row + i;
        const uint8_t *query = args->query + kbmla_query_row(args, num_heads, item->batch, row);
        job->kernels->widen(query, scratch->query[i], KBMLA_HEAD_DIM_QK);
        scratch->visible[i] = kbmla_visible_keys(length, total, job->config->q_len, row / num_heads,
                                                 job->config->causal, job->cp);
        most = kbmla_max(most, scratch->visible[i]);
        scratch->row_max[i] = -INFINITY;
        scratch->row_sum[i] = 0.0f;
        memset(scratch->out[i], 0, sizeof scratch->out[i]);
    }
    return most;
}

/* Where token `key` of the request lies; NULL if its page id is not one of the cache. */
static const uint8_t *key_address(const kbmla_decode_args *args, int32_t batch, int32_t key) {
    const int32_t page_size = (int32_t)args->page_size;
    if (args->num_pages == 0) /* then there may be no table either */
        return NULL;
    int32_t page = args->block_table[batch * args->block_table_stride + key / page_size];
    if (page < 0 || page >= args->num_pages)
        return NULL;
    return args->cache + page * args->cache_page_stride + key % page_size * args->cache_row_stride;
}

/* Copies keys first_key .. first_key + num_keys to the tile. A page that the cache does not have
 * reads as NaN. */
static void load_tile(const kbmla_decode_args *args, int32_t batch, int32_t first_key,
                      int32_t num_keys, kbmla_cpu_scratch *scratch) {
    const int32_t page_size = (int32_t)args->page_size;
    int32_t count = 0;
    for (int32_t key = 0; key < num_keys; key += count) {
        count = kbmla_min(page_size - (first_key + key) % page_size, num_keys - key);
        const uint8_t *from = key_address(args, batch, first_key + key);
        for (int32_t i = 0; i < count; i++) {
            if (from != NULL)
                memcpy(scratch->tile[key + i], from + i * args->cache_row_stride,
                       KBMLA_HEAD_DIM_QK);
            else
                memset(scratch->tile[key + i], 0x7F, KBMLA_HEAD_DIM_QK);
        }
    }
}

/* ------------------------------------------------------------------ outputs
 * A row whose sum is 0 has seen no key. Its lse is -inf and its output 0 by selection. */

static float row_lse(const decode_job *job, const kbmla_cpu_scratch *scratch, int32_t row) {
    float sum = scratch->row_sum[row];
    if (sum == 0.0f)
        return -INFINITY;
    return (float)(log2((double)sum) +
                   (double)scratch->row_max[row] * (double)job->softmax.scale_log2);
}

/* O of such a row is 0 times values that may be anything. */
static void clear_empty_rows(const decode_item *item, kbmla_cpu_scratch *scratch) {
    for (int32_t i = 0; i < item->rows; i++)
        if (scratch->row_sum[i] == 0.0f)
            memset(scratch->out[i], 0, sizeof scratch->out[i]);
}

/* What O of a row is multiplied by: scale over the sum of P8's unrounded counterparts. */
static float row_factor(const decode_job *job, const kbmla_cpu_scratch *scratch, int32_t row) {
    float sum = scratch->row_sum[row];
    return sum == 0.0f ? 0.0f : 1.0f / (sum * job->softmax.p_scale);
}

static void store_final(const decode_job *job, const decode_item *item,
                        const kbmla_cpu_scratch *scratch) {
    const kbmla_decode_args *args = job->args;
    const int32_t num_heads = job->config->num_heads;
    const float output_scale = (float)args->output_scale;
    for (int32_t i = 0; i < item->rows; i++) {
        const int32_t row = item->first_row + i;
        float factor = row_factor(job, scratch, i);
        uint16_t *out = args->out + kbmla_out_row(args, num_heads, item->batch, row);
        for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
            out[d] = kbmla_float_to_bf16(scratch->out[i][d] * factor * output_scale);
        if (args->lse != NULL)
            args->lse[kbmla_lse_row(args, num_heads, item->batch, row)] = row_lse(job, scratch, i);
    }
}

static void store_partial(const decode_job *job, const decode_item *item,
                          const kbmla_cpu_scratch *scratch) {
    char *workspace = (char *)job->args->workspace;
    float *lse = (float *)(void *)(workspace + job->sizes->partial_lse_offset);
    for (int32_t i = 0; i < item->rows; i++) {
        int64_t row = (int64_t)item->slot * job->sizes->q_tile_rows + i;
        float factor = row_factor(job, scratch, i);
        lse[row] = row_lse(job, scratch, i);
        if (job->config->partial_fp16) {
            uint16_t *out = (uint16_t *)(void *)workspace + row * KBMLA_HEAD_DIM_V;
            for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
                out[d] = kbmla_float_to_fp16(scratch->out[i][d] * factor);
        } else {
            float *out = (float *)(void *)workspace + row * KBMLA_HEAD_DIM_V;
            for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
                out[d] = scratch->out[i][d] * factor;
        }
    }
}

/* ------------------------------------------------------------------ the walk */

static void run_item(const decode_job *job, const decode_item *item, kbmla_cpu_scratch *scratch) {
    int32_t end_key = kbmla_min(item->end_key, load_rows(job, item, scratch));
    for (int32_t tile = item->first_key / KBMLA_TILE_TOKENS; tile < kbmla_num_tiles(end_key);
         tile++) {
        int32_t key = tile * KBMLA_TILE_TOKENS;
        int32_t num_keys = kbmla_min(end_key - key, KBMLA_TILE_TOKENS);
        load_tile(job->args, item->batch, key, num_keys, scratch);
        job->kernels->attend_tile(scratch, item->rows, key, num_keys, &job->softmax);
    }
    clear_empty_rows(item, scratch);
    if (item->slot < 0)
        store_final(job, item, scratch);
    else
        store_partial(job, item, scratch);
}

/* kbmla_parallel_body over clusters. */
static void run_clusters(int64_t begin, int64_t end, void *context) {
    const decode_job *job = (const decode_job *)context;
    kbmla_cpu_scratch scratch;
    for (int64_t cluster = begin; cluster < end; cluster++) {
        kbmla_work_walk walk = {
            .work = job->args->work,
            .work_len = job->sizes->list_len - job->config->max_requests,
            .num_requests = job->args->num_requests,
            .cluster_size = 1,
            .num_ctas = job->config->num_clusters,
            .linear_idx = (int32_t)cluster,
        };
        for (;;) {
            kbmla_tile tile = kbmla_work_walk_current(&walk);
            decode_item item;
            if (!tile.is_valid)
                break;
            if (make_item(job, tile, &item))
                run_item(job, &item, &scratch);
            kbmla_work_walk_advance(&walk, 1);
        }
    }
}

kbmla_status kbmla_cpu_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                              const kbmla_decode_args *args, struct CUstream_st *stream,
                              kbmla_error *err) {
    (void)stream;
    (void)err;
    if (args->num_requests == 0)
        return KBMLA_OK;
    const double log2_e = 1.4426950408889634;
    decode_job job = {
        .config = config,
        .sizes = sizes,
        .args = args,
        .kernels = kbmla_cpu_current_kernels(),
        .softmax = {.scale_log2 = (float)(args->softmax_scale * log2_e),
                    .allowance = 8.0f - log2f(config->p_scale),
                    .p_scale = config->p_scale},
        .cp = {args->cp_world, args->cp_rank, args->cp_interleave},
    };
    if (args->parallel_for != NULL)
        args->parallel_for(config->num_clusters, run_clusters, &job, args->parallel_pool);
    else
        run_clusters(0, config->num_clusters, &job);
    return KBMLA_OK;
}
