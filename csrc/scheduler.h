/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two ways the CTAs of a grid find their work, host and device: along a planned work list, and
 * along a static (cta, q tile, request, split) grid. The kernels, the CPU backend and the Python
 * classes in kbmla/helpers.py all step through these functions.
 *
 * A walk is a plain struct. `..._current` reads the tile it stands on and `..._advance` steps, so a
 * producer and a consumer that hold a copy each visit the same tiles without sharing state. A walk
 * never leaves its list: an index past the end is an invalid tile, and a step saturates. A tile
 * from a work list has batch < num_requests; q_tile and split come from the entry as they are, so
 * a reader that cannot trust the plan compares them with its own limits.
 */
#ifndef KBMLA_SCHEDULER_H
#define KBMLA_SCHEDULER_H

#include <stdint.h>

#include "rules.h"

/* What one CTA does in one step. */
typedef struct kbmla_tile {
    int32_t cta; /* rank within its cluster */
    int32_t q_tile;
    int32_t batch;
    int32_t split;
    int32_t is_valid; /* 0 ends the walk */
} kbmla_tile;

/* from + count * stride, kept within 0..INT32_MAX so that no step wraps back into a list. */
KBMLA_HOST_DEVICE int32_t kbmla_step(int32_t from, int32_t count, int32_t stride) {
    int64_t next = (int64_t)from + (int64_t)count * stride;
    return next < 0 ? 0 : next > INT32_MAX ? INT32_MAX : (int32_t)next;
}

/* ------------------------------------------------------------------ work list
 * Persistent: CTA i belongs to cluster i / cluster_size, and cluster c takes entries c,
 * c + num_ctas / cluster_size, ... A kernel that walks by cluster sets cluster_size to 1, num_ctas
 * to the number of clusters and linear_idx to its cluster's index. */

typedef struct kbmla_work_walk {
    const int32_t *work;  /* [work_len], see rules.h */
    int32_t work_len;     /* entries that may be read */
    int32_t num_requests; /* B of the plan */
    int32_t cluster_size; /* CTAs of a cluster, >= 1 */
    int32_t num_ctas;     /* of the grid, >= 1 */
    int32_t linear_idx;   /* starts at the CTA's index in the grid, >= 0 */
} kbmla_work_walk;

/* Where in the list the walk stands; may lie past its end. */
KBMLA_HOST_DEVICE int32_t kbmla_work_walk_index(const kbmla_work_walk *walk) {
    return walk->linear_idx / walk->cluster_size;
}

/* The tile of `entry`, read by whatever means from the index above. */
KBMLA_HOST_DEVICE kbmla_tile kbmla_work_walk_tile(const kbmla_work_walk *walk, int32_t entry) {
    kbmla_tile tile = {walk->linear_idx % walk->cluster_size, 0, 0, 0, 0};
    if (walk->num_requests > 0) {
        kbmla_work_tile work = kbmla_unpack_entry(entry, walk->num_requests);
        tile.q_tile = work.q_tile;
        tile.batch = work.batch;
        tile.split = work.split;
        tile.is_valid = work.is_valid;
    }
    return tile;
}

KBMLA_HOST_DEVICE kbmla_tile kbmla_work_walk_current(const kbmla_work_walk *walk) {
    int32_t index = kbmla_work_walk_index(walk);
    return kbmla_work_walk_tile(walk, index < walk->work_len ? walk->work[index] : -1);
}

KBMLA_HOST_DEVICE void kbmla_work_walk_advance(kbmla_work_walk *walk, int32_t count) {
    walk->linear_idx = kbmla_step(walk->linear_idx, count, walk->num_ctas);
}

/* ------------------------------------------------------------------ static grid
 * Every (cta, q tile, request, split) of a fixed split count. Persistent: tiles in linear order,
 * cta fastest, then q tile, request and split, num_ctas apart. Otherwise one tile per CTA, at its
 * place (x, y, z) in a grid of (cluster_size, q_tiles * requests, splits), request fastest in y. */

typedef struct kbmla_static_walk {
    int32_t is_persistent;
    int32_t num_requests;
    int32_t num_q_tiles;
    int32_t cluster_size; /* CTAs along the cluster's first dimension, >= 1 */
    int32_t num_splits;
    int32_t num_ctas;   /* of the grid; persistent only */
    int32_t linear_idx; /* persistent only: starts at the CTA's index in the grid, >= 0 */
    int32_t block[3];   /* otherwise: the CTA's place in the grid */
    int32_t is_valid;   /* otherwise: 1 until the walk has advanced */
} kbmla_static_walk;

/* Tiles of a whole walk over the grid, at most INT32_MAX. */
KBMLA_HOST_DEVICE int32_t kbmla_static_walk_size(const kbmla_static_walk *walk) {
    int32_t pairs = kbmla_step(0, walk->num_requests, walk->num_q_tiles);
    return kbmla_step(0, kbmla_step(0, pairs, walk->cluster_size), walk->num_splits);
}

KBMLA_HOST_DEVICE kbmla_tile kbmla_static_walk_current(const kbmla_static_walk *walk) {
    kbmla_tile tile = {0, 0, 0, 0, 0};
    if (walk->num_requests <= 0 || walk->num_q_tiles <= 0 || walk->num_splits <= 0)
        return tile;
    if (walk->is_persistent) {
        int32_t rest = walk->linear_idx / walk->cluster_size;
        tile.cta = walk->linear_idx % walk->cluster_size;
        tile.q_tile = rest % walk->num_q_tiles;
        rest /= walk->num_q_tiles;
        tile.batch = rest % walk->num_requests;
        tile.split = rest / walk->num_requests % walk->num_splits;
        tile.is_valid = walk->linear_idx < kbmla_static_walk_size(walk);
    } else {
        tile.cta = walk->block[0];
        tile.q_tile = walk->block[1] / walk->num_requests;
        tile.batch = walk->block[1] % walk->num_requests;
        tile.split = walk->block[2];
        tile.is_valid = walk->is_valid;
    }
    return tile;
}

KBMLA_HOST_DEVICE void kbmla_static_walk_advance(kbmla_static_walk *walk, int32_t count) {
    if (walk->is_persistent)
        walk->linear_idx = kbmla_step(walk->linear_idx, count, walk->num_ctas);
    else
        walk->is_valid = 0;
}

/* Grid of a static launch. Persistent: as many CTAs as `max_clusters` clusters of `cluster_volume`
 * CTAs hold, or as there are tiles, whichever is less. */
KBMLA_HOST_DEVICE void kbmla_static_walk_grid(const kbmla_static_walk *walk, int32_t max_clusters,
                                              int32_t cluster_volume, int32_t grid[3]) {
    if (walk->is_persistent) {
        grid[0] =
            kbmla_min(kbmla_step(0, max_clusters, cluster_volume), kbmla_static_walk_size(walk));
        grid[1] = 1;
        grid[2] = 1;
    } else {
        grid[0] = walk->cluster_size;
        grid[1] = kbmla_step(0, walk->num_requests, walk->num_q_tiles);
        grid[2] = walk->num_splits;
    }
}

#endif
