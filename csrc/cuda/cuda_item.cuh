/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the decode kernels share around their main loops: their parameters, the walk of a block
 * along the work list, what an entry of it comes to, and where results go.
 *
 * A cluster of the plan is a group of `blocks_per_cluster` neighbouring blocks that share a q tile:
 * each takes `block_rows` of its rows over the same KV range.
 */
#ifndef KBMLA_CUDA_ITEM_CUH
#define KBMLA_CUDA_ITEM_CUH

#include "../internal.h"
#include "../scheduler.h"
#include "cuda_ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>

/* A stage of the ring: a tile of 64 KV tokens, latent and rope apart. Eight warps consume it. */
enum {
    STAGE_TOKENS = 64,
    LATENT_BYTES = STAGE_TOKENS * KBMLA_HEAD_DIM_V,
    ROPE_BYTES = STAGE_TOKENS * (KBMLA_HEAD_DIM_QK - KBMLA_HEAD_DIM_V),
    STAGE_BYTES = LATENT_BYTES + ROPE_BYTES,
    CONSUMER_WARPS = 8,
    CONSUMERS = 32 * CONSUMER_WARPS,
    CONSUMER_BARRIER = 1,
    NAN_BYTES = 0x7F7F7F7F
};

struct decode_params {
    kbmla_decode_args args;
    kbmla_sizes sizes;
    int32_t num_heads;
    int32_t q_len;
    int32_t num_clusters;
    int32_t blocks_per_cluster;
    int32_t block_rows;
    int32_t tail;       /* index of the first partial base in the work list */
    int32_t max_tokens; /* that a row of the block table holds */
    int32_t page_shift; /* log2 of the page size */
    int32_t causal;
    int32_t partial_fp16;
    float softmax_scale_log2;
    float output_scale;
    float p_scale;
    float log2_p_scale;
    float growth; /* the row maximum is kept while it grows by at most this, log2 */
    int32_t num_stages;
};

static inline decode_params make_decode_params(const kbmla_config *config, const kbmla_sizes *sizes,
                                               const kbmla_decode_args *args) {
    decode_params params = {};
    params.args = *args;
    params.sizes = *sizes;
    params.num_heads = config->num_heads;
    params.q_len = config->q_len;
    params.num_clusters = config->num_clusters;
    params.tail = sizes->list_len - config->max_requests;
    params.max_tokens = kbmla_clamp_length(INT32_MAX, args->max_pages * args->page_size);
    while ((int64_t)1 << params.page_shift < args->page_size)
        params.page_shift++;
    params.causal = config->causal;
    params.partial_fp16 = config->partial_fp16;
    params.softmax_scale_log2 = (float)(args->softmax_scale * 1.4426950408889634);
    params.output_scale = (float)args->output_scale;
    params.p_scale = config->p_scale;
    params.log2_p_scale = log2f(config->p_scale);
    params.growth = 8.0f - params.log2_p_scale;
    return params;
}

static __device__ __forceinline__ kbmla_work_walk start_walk(const decode_params &params) {
    kbmla_work_walk walk;
    walk.work = params.args.work;
    walk.work_len = params.tail;
    walk.num_requests = params.args.num_requests;
    walk.cluster_size = 1;
    walk.num_ctas = params.num_clusters;
    walk.linear_idx = (int32_t)blockIdx.x / params.blocks_per_cluster;
    return walk;
}

/* What lengths and plan say of a request. */
struct request_facts {
    int32_t length, planned, element;
};

/* Brings lengths and plan into L2, before the wait. */
static __device__ __forceinline__ void prefetch_plan(const decode_params &params) {
    const int32_t first = 32 * (int32_t)threadIdx.x; /* a line of 128 bytes */
    if (first < params.args.num_requests) {
        prefetch_l2(params.args.lengths + first);
        prefetch_l2(params.args.counts + first);
        prefetch_l2(params.args.work + params.tail + first);
    }
    if (threadIdx.x == 0)
        prefetch_l2(params.args.work + (int32_t)blockIdx.x / params.blocks_per_cluster);
}

/* What an entry of the list comes to for one block. */
struct work_item {
    int32_t batch;
    uint32_t begin;    /* first KV token; unsigned, as a tile may reach past 2^31 */
    uint32_t end;      /* past the last */
    int32_t slot;      /* partial slot, -1 when the output is direct */
    int32_t length;    /* readable tokens */
    int32_t tile_row;  /* this block's first row within the q tile */
    int32_t first_row; /* and within the request */
    int32_t rows;      /* rows of this block that exist; may be <= 0 */
};

/* False for an entry that a stale or foreign plan made and that has nothing to do here; `item` is
 * then of no tokens. `facts` are those of the tile's request. */
static __device__ __forceinline__ bool make_item(const decode_params &params,
                                                 const request_facts &facts, const kbmla_tile &tile,
                                                 work_item &item) {
    const int32_t length = kbmla_clamp_length(facts.length, params.max_tokens);
    const kbmla_split_range range =
        kbmla_split_bounds(kbmla_num_tiles(length), facts.planned, tile.split);
    const int32_t base = kbmla_checked_base(facts.element, facts.planned, params.sizes.num_q_tiles,
                                            params.sizes.max_partials);
    item = {};
    if (tile.q_tile >= params.sizes.num_q_tiles || tile.split >= range.count ||
        (range.count > 1 && base < 0))
        return false;
    item.batch = tile.batch;
    item.begin = (uint32_t)range.begin_tile * KBMLA_TILE_TOKENS;
    item.end = min((uint32_t)range.end_tile * KBMLA_TILE_TOKENS, (uint32_t)length);
    item.length = length;
    item.tile_row = params.block_rows * ((int32_t)blockIdx.x % params.blocks_per_cluster);
    item.first_row = tile.q_tile * params.sizes.q_tile_rows + item.tile_row;
    item.rows = kbmla_min(
        kbmla_min(params.sizes.q_tile_rows - item.tile_row, params.sizes.rows - item.first_row),
        params.block_rows);
    item.slot =
        range.count > 1 ? kbmla_partial_slot(base, tile.q_tile, facts.planned, tile.split) : -1;
    return true;
}

/* Leading keys that row `row` of a request sees. */
static __device__ __forceinline__ int32_t visible_keys(const decode_params &params, int32_t batch,
                                                       int32_t length, int32_t row) {
    const kbmla_context_parallel cp = {params.args.cp_world, params.args.cp_rank,
                                       params.args.cp_interleave};
    int32_t total = params.args.causal_lens != NULL ? params.args.causal_lens[batch] : length;
    return kbmla_visible_keys(length, total, params.q_len, row / params.num_heads, params.causal,
                              cp);
}

/* ------------------------------------------------------------------ rows in memory */

static __device__ __forceinline__ const uint8_t *query_row(const decode_params &params,
                                                           int32_t batch, int32_t row) {
    return params.args.query + kbmla_query_row(&params.args, params.num_heads, batch, row);
}

/* What stands for the address of a KV row on a page that the cache does not have. */
static const uint64_t MISSING_ROW = 1;

/* Address of the row of KV token `token`; `table` is the request's row of the block table. */
static __device__ __forceinline__ uint64_t cache_row(const decode_params &params,
                                                     const int32_t *table, uint32_t token) {
    const int32_t page = table[token >> params.page_shift];
    const uint32_t page_row = token & ((uint32_t)params.args.page_size - 1);
    return (uint32_t)page < (uint64_t)params.args.num_pages
               ? (uint64_t)(params.args.cache + page * params.args.cache_page_stride +
                            page_row * params.args.cache_row_stride)
               : MISSING_ROW;
}

/* Row of the workspace of row `local` of the block. */
static __device__ __forceinline__ int64_t partial_row(const decode_params &params, int32_t slot,
                                                      int32_t tile_row, int32_t local) {
    return (int64_t)slot * params.sizes.q_tile_rows + tile_row + local;
}

static __device__ __forceinline__ float *partial_lse(const decode_params &params, int64_t row) {
    return reinterpret_cast<float *>(static_cast<uint8_t *>(params.args.workspace) +
                                     params.sizes.partial_lse_offset) +
           row;
}

#endif
