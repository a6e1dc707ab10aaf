/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The integer rules every backend shares, host and device: row packing, work entries, split
 * bounds, partial slots and the causal bound. Each rule has its one definition here; the planner's
 * balancing rule is in plan_rule.h.
 */
#ifndef KBMLA_RULES_H
#define KBMLA_RULES_H

#include <stdint.h>

#include "kbmla.h"

#ifdef __CUDACC__
#define KBMLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KBMLA_HOST_DEVICE static inline
#endif

KBMLA_HOST_DEVICE int32_t kbmla_min(int32_t a, int32_t b) {
    return a < b ? a : b;
}
KBMLA_HOST_DEVICE int32_t kbmla_max(int32_t a, int32_t b) {
    return a > b ? a : b;
}

/* floor(a / b) for 0 <= a < 2^20, b > 0. On a device a float quotient is within one of it, at a
 * third of the instructions of an integer division. */
KBMLA_HOST_DEVICE int32_t kbmla_div_small(int32_t a, int32_t b) {
#ifdef __CUDA_ARCH__
    int32_t quotient = (int32_t)__fdividef((float)a, (float)b);
    int32_t rest = a - quotient * b;
    return quotient + (rest >= b) - (rest < 0);
#else
    return a / b;
#endif
}

/* floor(a / b) for a >= 0, b > 0. */
KBMLA_HOST_DEVICE int32_t kbmla_div(int32_t a, int32_t b) {
    return a < (1 << 20) ? kbmla_div_small(a, b) : a / b;
}

/* Rounded up; it cannot overflow for any int32 a >= 0. */
KBMLA_HOST_DEVICE int32_t kbmla_ceil_div(int32_t a, int32_t b) {
    int32_t quotient = kbmla_div(a, b);
    return quotient + (a != quotient * b);
}

/* ------------------------------------------------------------------ query rows
 * Rows of a request are packed row = token * heads + head and cut into q tiles of q_tile_rows. */

/* Rows of `q_tile` that exist: q_tile_rows but for the last tile. */
KBMLA_HOST_DEVICE int32_t kbmla_tile_valid_rows(int32_t rows, int32_t q_tile_rows, int32_t q_tile) {
    return kbmla_min(q_tile_rows, rows - q_tile * q_tile_rows);
}

KBMLA_HOST_DEVICE int64_t kbmla_row_offset(int32_t num_heads, int32_t batch, int32_t row,
                                           int64_t batch_stride, int64_t token_stride,
                                           int64_t head_stride) {
    int32_t token = kbmla_div_small(row, num_heads), head = row - token * num_heads;
    return batch * batch_stride + token * token_stride + head * head_stride;
}

/* Where row `row` of request `batch` begins: its byte of query, its elements of out and lse. */
KBMLA_HOST_DEVICE int64_t kbmla_query_row(const kbmla_decode_args *args, int32_t num_heads,
                                          int32_t batch, int32_t row) {
    return kbmla_row_offset(num_heads, batch, row, args->query_batch_stride,
                            args->query_token_stride, args->query_head_stride);
}
KBMLA_HOST_DEVICE int64_t kbmla_out_row(const kbmla_decode_args *args, int32_t num_heads,
                                        int32_t batch, int32_t row) {
    return kbmla_row_offset(num_heads, batch, row, args->out_batch_stride, args->out_token_stride,
                            args->out_head_stride);
}
KBMLA_HOST_DEVICE int64_t kbmla_lse_row(const kbmla_decode_args *args, int32_t num_heads,
                                        int32_t batch, int32_t row) {
    return kbmla_row_offset(num_heads, batch, row, args->lse_batch_stride, args->lse_token_stride,
                            args->lse_head_stride);
}

/* ------------------------------------------------------------------ work list
 * An entry is (q_tile * B + batch) << 8 | split, or negative. Valid entries are a prefix; all that
 * follows is negative, at least one wave of it. The last max_requests elements of the list hold
 * ~(first partial slot) of each request: negative too, so a walk that reached them would end.
 * Cluster i of the wave takes entries i, i + num_clusters, ... until a negative one. */

typedef struct kbmla_work_tile {
    int32_t q_tile;
    int32_t batch;
    int32_t split;
    int32_t is_valid;
} kbmla_work_tile;

KBMLA_HOST_DEVICE int32_t kbmla_pack_entry(int32_t q_tile, int32_t batch, int32_t split,
                                           int32_t num_requests) {
    return (q_tile * num_requests + batch) << 8 | split;
}

KBMLA_HOST_DEVICE kbmla_work_tile kbmla_unpack_entry(int32_t entry, int32_t num_requests) {
    int32_t packed = kbmla_max(entry, 0);
    kbmla_work_tile tile;
    tile.q_tile = kbmla_div(packed >> 8, num_requests);
    tile.batch = (packed >> 8) - tile.q_tile * num_requests;
    tile.split = packed & 255;
    tile.is_valid = entry >= 0;
    return tile;
}

/* ------------------------------------------------------------------ splits */

/* KV tiles of a length; a length <= 0 has none. */
KBMLA_HOST_DEVICE int32_t kbmla_num_tiles(int32_t length) {
    return (int32_t)(((uint32_t)kbmla_max(length, 0) + KBMLA_TILE_TOKENS - 1) / KBMLA_TILE_TOKENS);
}

typedef struct kbmla_split_range {
    int32_t begin_tile;
    int32_t end_tile; /* begin == end: nothing to read */
    int32_t count;    /* splits that are not empty, >= 1 */
} kbmla_split_range;

/* Tiles of split `split` of a request of `tiles` tiles cut into `count` splits. `count` is taken
 * as 1..tiles and normalised so that no split is empty; a `split` past it gets an empty range. */
KBMLA_HOST_DEVICE kbmla_split_range kbmla_split_bounds(int32_t tiles, int32_t count,
                                                       int32_t split) {
    kbmla_split_range range = {0, 0, 1};
    if (tiles > 0) {
        int32_t wanted = kbmla_min(kbmla_max(count, 1), kbmla_min(tiles, KBMLA_MAX_SPLITS));
        int32_t per = kbmla_ceil_div(tiles, wanted);
        range.count = kbmla_ceil_div(tiles, per);
        if (split < range.count) {
            range.begin_tile = split * per;
            range.end_tile = range.begin_tile + kbmla_min(per, tiles - range.begin_tile);
        }
    }
    return range;
}

/* A count without empty splits: ceil(tiles / ceil(tiles / count)), at least 1. */
KBMLA_HOST_DEVICE int32_t kbmla_normalise_count(int32_t tiles, int32_t count) {
    return kbmla_split_bounds(tiles, count, 0).count;
}

/* ------------------------------------------------------------------ partial results
 * Slot of an entry of a split request. The workspace holds partial_o [slots, q_tile_rows, 512],
 * then partial_lse [slots, q_tile_rows] float. `base` is the request's first slot. */

KBMLA_HOST_DEVICE int32_t kbmla_partial_slot(int32_t base, int32_t q_tile, int32_t planned_count,
                                             int32_t split) {
    return base + q_tile * planned_count + split;
}

/* First slot of a split request from its element of the list's tail; -1 if a foreign plan put a
 * slot there that the workspace does not have. */
KBMLA_HOST_DEVICE int32_t kbmla_checked_base(int32_t tail_element, int32_t planned_count,
                                             int32_t num_q_tiles, int32_t max_partials) {
    int32_t base = ~tail_element;
    int64_t end = (int64_t)base + (int64_t)planned_count * num_q_tiles;
    return base >= 0 && planned_count > 0 && end <= max_partials ? base : -1;
}

/* ------------------------------------------------------------------ lengths
 * KV tokens that decode may read: within 0 and what the request's row of the block table holds. */
KBMLA_HOST_DEVICE int32_t kbmla_clamp_length(int32_t length, int64_t max_tokens) {
    return length <= 0 ? 0 : length < max_tokens ? length : (int32_t)max_tokens;
}

/* ------------------------------------------------------------------ causal bound */

typedef struct kbmla_context_parallel {
    int32_t world;
    int32_t rank;
    int32_t interleave;
} kbmla_context_parallel;

/* How many of the first `global` tokens live on this rank: local token c is the global token
 * ((c / I) * W + R) * I + c % I. */
KBMLA_HOST_DEVICE int32_t kbmla_local_length(int32_t global, kbmla_context_parallel cp) {
    int64_t period = (int64_t)cp.interleave * cp.world;
    /* A 32-bit division, where there is one to do at all. */
    int32_t full = period > global ? 0 : global / (int32_t)period;
    int32_t left = period > global ? global : global - full * (int32_t)period;
    int64_t rest = (int64_t)left - (int64_t)cp.rank * cp.interleave;
    int32_t own = rest < 0 ? 0 : rest > cp.interleave ? cp.interleave : (int32_t)rest;
    return full * cp.interleave + own;
}

/* Number of leading local keys that query token `token` of `q_len` sees. `length` is the local
 * length; `total` is the global one, equal to `length` when world is 1. */
KBMLA_HOST_DEVICE int32_t kbmla_visible_keys(int32_t length, int32_t total, int32_t q_len,
                                             int32_t token, int32_t causal,
                                             kbmla_context_parallel cp) {
    if (!causal)
        return kbmla_max(length, 0);
    int64_t bound = (int64_t)total - (q_len - 1) + token;
    int32_t global = bound > 0 ? (int32_t)bound : 0;
    return kbmla_max(0, kbmla_min(kbmla_local_length(global, cp), length));
}

#endif
