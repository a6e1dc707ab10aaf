/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decode step made up for a test: random inputs in poisoned buffers, a plan with chosen split
 * counts, and what the result must be.
 *
 * Everything that may not be read is poison: cache bytes outside the keys of a request are NaN,
 * block table columns past its pages are huge or negative, the workspace is NaN. Everything that
 * may not be written is checked afterwards. Buffers are exactly as long as they must be, so that
 * an address sanitizer sees a step outside.
 *
 * Two references, both in double: the exact attention over the dequantised inputs, and a model of
 * the numerics of the rule in README.md (tiles, lazy maximum, P rounded to E4M3) under the same
 * plan.
 */
#ifndef KBMLA_TEST_DECODE_CASE_H
#define KBMLA_TEST_DECODE_CASE_H

#include <string.h>

#include "check.h"
#include "e4m3.h"
#include "internal.h"

enum { MAX_BATCH = 6, GAP = 8, OUT_POISON = 0xABCD, CASE_CLUSTERS = 40 };

typedef struct shape {
    const char *name;
    int32_t heads, q_len, page_size;
    int32_t num_requests;
    int32_t lengths[MAX_BATCH]; /* global under DCP */
    int32_t counts[MAX_BATCH];
    int32_t world, rank, interleave; /* 0, 0, 0 stands for 1, 0, 1 */
    int32_t no_causal, partial_fp16;
    float p_scale; /* 0 stands for 1 */
    double growth; /* scale of the last key against the first; 0 stands for 1 */
} shape;

typedef struct decode_case {
    const shape *shape;
    kbmla_config config;
    kbmla_sizes sizes;
    kbmla_decode_args args;
    int32_t totals[MAX_BATCH], lengths[MAX_BATCH], counts[MAX_BATCH];
    uint8_t *query, *cache;
    int32_t *block_table, *work;
    uint16_t *out;
    float *lse, *workspace;
    size_t query_bytes, cache_bytes, out_len, lse_len, table_len;
} decode_case;

/* ------------------------------------------------------------------ E4M3 */

/* The byte nearest to x; ties are not told apart, the values are random. */
static uint8_t encode_e4m3(double x) {
    double magnitude = fabs(x);
    int low = 0, high = 0x7E;
    while (low < high) {
        int middle = (low + high) / 2;
        double border = 0.5 * ((double)kbmla_e4m3_to_float((uint8_t)middle) +
                               (double)kbmla_e4m3_to_float((uint8_t)(middle + 1)));
        if (magnitude > border)
            low = middle + 1;
        else
            high = middle;
    }
    return (uint8_t)(low | (x < 0 ? 0x80 : 0));
}

/* A random byte of normal distribution with deviation `scale`; for 1 from a table, which is what
 * most of the many bytes of a cache are made of. */
static uint8_t random_e4m3(double scale) {
    static uint8_t table[1 << 12];
    static int is_filled;
    for (; !is_filled; is_filled = 1)
        for (size_t i = 0; i < sizeof table; i++)
            table[i] = encode_e4m3(random_normal());
    return scale == 1.0 ? table[random_bits() % sizeof table]
                        : encode_e4m3(random_normal() * scale);
}

/* ------------------------------------------------------------------ addresses */

static const uint8_t *case_query(const decode_case *c, int batch, int row) {
    return c->query + batch * c->args.query_batch_stride +
           row / c->shape->heads * c->args.query_token_stride +
           row % c->shape->heads * c->args.query_head_stride;
}

static uint8_t *case_key(const decode_case *c, int batch, int key) {
    int32_t page = c->block_table[batch * c->args.block_table_stride + key / c->shape->page_size];
    return c->cache + page * c->args.cache_page_stride +
           key % c->shape->page_size * c->args.cache_row_stride;
}

static uint16_t *case_out(const decode_case *c, int batch, int row) {
    return c->out + batch * c->args.out_batch_stride +
           row / c->shape->heads * c->args.out_token_stride +
           row % c->shape->heads * c->args.out_head_stride;
}

static float *case_lse(const decode_case *c, int batch, int row) {
    return c->lse + batch * c->args.lse_batch_stride +
           row / c->shape->heads * c->args.lse_token_stride +
           row % c->shape->heads * c->args.lse_head_stride;
}

/* ------------------------------------------------------------------ construction */

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes > 0 ? bytes : 1);
    if (memory == NULL)
        abort();
    return memory;
}

/* Entries of all requests in a shuffled order, slots in the order of requests. */
static void case_plan(decode_case *c) {
    const kbmla_sizes *sizes = &c->sizes;
    int32_t num_entries = 0, slot = 0;
    for (int32_t i = 0; i < sizes->list_len; i++)
        c->work[i] = -1;
    for (int32_t b = 0; b < c->shape->num_requests; b++) {
        int32_t count = kbmla_normalise_count(kbmla_num_tiles(c->lengths[b]), c->shape->counts[b]);
        c->counts[b] = count;
        c->work[sizes->list_len - c->config.max_requests + b] = ~slot;
        slot += count > 1 ? count * sizes->num_q_tiles : 0;
        for (int32_t q = 0; q < sizes->num_q_tiles; q++)
            for (int32_t s = 0; s < count; s++) {
                int32_t place = random_below(++num_entries);
                c->work[num_entries - 1] = c->work[place];
                c->work[place] = kbmla_pack_entry(q, b, s, c->shape->num_requests);
            }
    }
    CHECK(slot <= sizes->max_partials, "%s: the plan of the test does not fit", c->shape->name);
}

/* Fresh outputs and workspace: all poison. */
static void case_poison(const decode_case *c) {
    for (size_t i = 0; i < c->out_len; i++)
        c->out[i] = OUT_POISON;
    for (size_t i = 0; i < c->lse_len; i++)
        c->lse[i] = -12345.0f;
    memset(c->workspace, 0xFF, (size_t)c->sizes.workspace_bytes);
}

static void case_make(decode_case *c, const shape *shape) {
    memset(c, 0, sizeof *c);
    c->shape = shape;
    c->config = (kbmla_config)KBMLA_CONFIG_INIT;
    c->config.num_heads = shape->heads;
    c->config.q_len = shape->q_len;
    c->config.max_requests = MAX_BATCH;
    c->config.num_clusters = CASE_CLUSTERS;
    c->config.capacity = 1000;
    c->config.causal = !shape->no_causal;
    c->config.partial_fp16 = shape->partial_fp16;
    c->config.p_scale = shape->p_scale > 0.0f ? shape->p_scale : 1.0f;
    kbmla_error err;
    kbmla_status status = kbmla_config_sizes(&c->config, &c->sizes, &err);
    CHECK(status == KBMLA_OK, "%s", shape->name);

    kbmla_decode_args *args = &c->args;
    const int64_t batch = shape->num_requests, heads = shape->heads, q_len = shape->q_len;
    args->num_requests = shape->num_requests;
    args->cp_world = shape->world > 0 ? shape->world : 1;
    args->cp_rank = shape->rank;
    args->cp_interleave = shape->interleave > 0 ? shape->interleave : 1;
    args->softmax_scale = 0.0721687836;
    args->output_scale = 0.75;

    int32_t longest = 0, num_pages = 1; /* page 0 is listed by nobody */
    kbmla_context_parallel cp = {args->cp_world, args->cp_rank, args->cp_interleave};
    for (int32_t b = 0; b < batch; b++) {
        c->totals[b] = shape->lengths[b];
        c->lengths[b] = kbmla_local_length(kbmla_max(shape->lengths[b], 0), cp);
        longest = kbmla_max(longest, c->lengths[b]);
        num_pages += kbmla_ceil_div(c->lengths[b], shape->page_size);
    }
    args->lengths = c->lengths;
    args->causal_lens = args->cp_world > 1 ? c->totals : NULL;

    /* Query: heads outside tokens, all strides padded. */
    args->query_token_stride = KBMLA_HEAD_DIM_QK + GAP;
    args->query_head_stride = args->query_token_stride * q_len + GAP;
    args->query_batch_stride = args->query_head_stride * heads + GAP;
    c->query_bytes = (size_t)(args->query_batch_stride * batch);
    args->query = c->query = allocate(c->query_bytes);
    memset(c->query, 0x7F, c->query_bytes);
    for (int b = 0; b < batch; b++)
        for (int row = 0; row < c->sizes.rows; row++)
            for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
                c->query[case_query(c, b, row) - c->query + d] = random_e4m3(1.0);

    /* Cache and table: pages handed out in a random order, the rest poison. */
    args->page_size = shape->page_size;
    args->num_pages = num_pages;
    args->cache_row_stride = KBMLA_HEAD_DIM_QK + GAP;
    args->cache_page_stride = args->cache_row_stride * shape->page_size + 3 * GAP;
    args->max_pages = kbmla_ceil_div(longest, shape->page_size) + 2;
    args->block_table_stride = args->max_pages + 1;
    c->cache_bytes = (size_t)(args->cache_page_stride * num_pages);
    c->table_len = (size_t)(args->block_table_stride * batch);
    args->cache = c->cache = allocate(c->cache_bytes);
    args->block_table = c->block_table = allocate(c->table_len * sizeof(int32_t));
    memset(c->cache, 0xFF, c->cache_bytes);
    for (size_t i = 0; i < c->table_len; i++)
        c->block_table[i] = i % 2 ? INT32_MAX : -7;
    int32_t *order = allocate((size_t)num_pages * sizeof(int32_t));
    for (int32_t i = 0; i < num_pages; i++)
        order[i] = i;
    for (int32_t i = num_pages - 1; i > 1; i--) {
        int32_t other = 1 + random_below(i), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    int32_t next = 1;
    for (int b = 0; b < batch; b++) {
        for (int i = 0; i < kbmla_ceil_div(c->lengths[b], shape->page_size); i++)
            c->block_table[b * args->block_table_stride + i] = order[next++];
        for (int key = 0; key < c->lengths[b]; key++) {
            double scale = shape->growth > 0.0 ? pow(shape->growth, key / (double)longest) : 1.0;
            for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
                case_key(c, b, key)[d] = random_e4m3(scale);
        }
    }
    free(order);

    args->out_head_stride = KBMLA_HEAD_DIM_V + GAP;
    args->out_token_stride = args->out_head_stride * heads + GAP;
    args->out_batch_stride = args->out_token_stride * q_len + GAP;
    c->out_len = (size_t)(args->out_batch_stride * batch);
    args->out = c->out = allocate(c->out_len * sizeof(uint16_t));
    args->lse_token_stride = 1;
    args->lse_head_stride = q_len + 1;
    args->lse_batch_stride = args->lse_head_stride * heads + 1;
    c->lse_len = (size_t)(args->lse_batch_stride * batch);
    args->lse = c->lse = allocate(c->lse_len * sizeof(float));

    args->counts = c->counts;
    args->counts_len = MAX_BATCH;
    args->work = c->work = allocate((size_t)c->sizes.list_len * sizeof(int32_t));
    args->work_len = c->sizes.list_len;
    args->workspace = c->workspace = allocate((size_t)c->sizes.workspace_bytes);
    args->workspace_bytes = c->sizes.workspace_bytes;
    case_plan(c);
    case_poison(c);
}

static void case_free(const decode_case *c) {
    free(c->query);
    free(c->cache);
    free(c->block_table);
    free(c->work);
    free(c->out);
    free(c->lse);
    free(c->workspace);
}

static void case_run(const decode_case *c) {
    kbmla_status decoded = kbmla_cpu_decode(&c->config, &c->sizes, &c->args, NULL, NULL);
    kbmla_status reduced = kbmla_cpu_reduce(&c->config, &c->sizes, &c->args, NULL, NULL);
    CHECK(decoded == KBMLA_OK && reduced == KBMLA_OK, "%s", c->shape->name);
}

/* ------------------------------------------------------------------ references */

typedef struct row_result {
    double out[KBMLA_HEAD_DIM_V];
    double lse; /* log2 */
} row_result;

/* Leading local keys that a row sees, counted one by one from the definition. */
static int32_t count_visible(const decode_case *c, int batch, int row) {
    int32_t length = kbmla_readable_length(&c->args, batch), token = row / c->shape->heads;
    int64_t world = c->args.cp_world, interleave = c->args.cp_interleave;
    if (!c->config.causal)
        return length;
    int64_t total = c->args.causal_lens != NULL ? c->totals[batch] : length;
    int32_t visible = 0;
    while (visible < length) {
        int64_t position =
            (visible / interleave * world + c->args.cp_rank) * interleave + visible % interleave;
        if (position >= total - (c->shape->q_len - 1) + token)
            break;
        visible++;
    }
    return visible;
}

static void reference_scores(const decode_case *c, int batch, int row, int32_t visible,
                             double *score) {
    float query[KBMLA_HEAD_DIM_QK];
    for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
        query[d] = kbmla_e4m3_to_float(case_query(c, batch, row)[d]);
    for (int32_t key = 0; key < visible; key++) {
        score[key] = 0.0;
        for (int d = 0; d < KBMLA_HEAD_DIM_QK; d++)
            score[key] +=
                (double)query[d] * (double)kbmla_e4m3_to_float(case_key(c, batch, key)[d]);
    }
}

static void add_value(const decode_case *c, int batch, int key, double weight, double *out) {
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
        out[d] += weight * (double)kbmla_e4m3_to_float(case_key(c, batch, key)[d]);
}

/* Attention of the row, exact but for rounding in double. */
static void reference_exact(const decode_case *c, int batch, int row, row_result *result) {
    int32_t visible = count_visible(c, batch, row);
    double *score = allocate((size_t)visible * sizeof(double)), largest = -INFINITY, sum = 0.0;
    double scale_log2 = c->args.softmax_scale * 1.4426950408889634;
    memset(result, 0, sizeof *result);
    reference_scores(c, batch, row, visible, score);
    for (int32_t key = 0; key < visible; key++)
        largest = fmax(largest, score[key]);
    for (int32_t key = 0; key < visible; key++) {
        double p = exp2((score[key] - largest) * scale_log2);
        sum += p;
        add_value(c, batch, key, p, result->out);
    }
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
        result->out[d] *= sum > 0.0 ? c->args.output_scale / sum : 0.0;
    result->lse = sum > 0.0 ? log2(sum) + largest * scale_log2 : -INFINITY;
    free(score);
}

/* The numerics of the rule in README.md in double, under the plan of the case. */
static void reference_model(const decode_case *c, int batch, int row, row_result *result) {
    int32_t visible = count_visible(c, batch, row);
    int32_t tiles = kbmla_num_tiles(c->lengths[batch]);
    double *score = allocate((size_t)visible * sizeof(double));
    double scale_log2 = (double)(float)(c->args.softmax_scale * 1.4426950408889634);
    double p_scale = (double)c->config.p_scale, allowance = 8.0 - log2(p_scale);
    double weights = 0.0, top = -INFINITY;
    memset(result, 0, sizeof *result);
    reference_scores(c, batch, row, visible, score);
    for (int32_t split = 0; split < c->counts[batch]; split++) {
        kbmla_split_range range = kbmla_split_bounds(tiles, c->counts[batch], split);
        double m = -INFINITY, sum = 0.0, out[KBMLA_HEAD_DIM_V] = {0};
        for (int32_t tile = range.begin_tile; tile < range.end_tile; tile++) {
            int32_t begin = tile * KBMLA_TILE_TOKENS;
            int32_t end = kbmla_min(begin + KBMLA_TILE_TOKENS, visible);
            double tile_max = -INFINITY;
            for (int32_t key = begin; key < end; key++)
                tile_max = fmax(tile_max, score[key]);
            if (tile_max > m && !((tile_max - m) * scale_log2 <= allowance)) {
                double factor = exp2((m - tile_max) * scale_log2);
                sum *= factor;
                for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
                    out[d] *= factor;
                m = tile_max;
            }
            for (int32_t key = begin; key < end; key++) {
                double p = exp2((score[key] - m) * scale_log2);
                sum += p;
                add_value(c, batch, key, (double)kbmla_round_e4m3((float)(p * p_scale)), out);
            }
        }
        if (sum == 0.0)
            continue;
        double lse = log2(sum) + m * scale_log2, shift = lse > top ? exp2(top - lse) : 1.0;
        weights *= shift;
        for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
            result->out[d] *= shift;
        top = fmax(top, lse);
        weights += exp2(lse - top);
        for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
            result->out[d] += exp2(lse - top) * out[d] / (sum * p_scale);
    }
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++)
        result->out[d] *= weights > 0.0 ? c->args.output_scale / weights : 0.0;
    result->lse = weights > 0.0 ? top + log2(weights) : -INFINITY;
    free(score);
}

/* |out - result| / |result| of a row; the norm of out where the result is 0. */
static double row_error(const decode_case *c, int batch, int row, const row_result *result) {
    double error = 0.0, norm = 0.0;
    for (int d = 0; d < KBMLA_HEAD_DIM_V; d++) {
        double x = (double)kbmla_bf16_to_float(case_out(c, batch, row)[d]) - result->out[d];
        error += x * x;
        norm += result->out[d] * result->out[d];
    }
    return norm > 0.0 ? sqrt(error / norm) : sqrt(error);
}

#endif
