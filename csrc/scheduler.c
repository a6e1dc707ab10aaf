/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walks of scheduler.h, and the split bounds of rules.h, as linkable functions, for callers
 * that cannot include a C header (the Python classes of kbmla/helpers.py reach them through
 * ctypes).
 */
#include "scheduler.h"

void kbmla_split_range_of(int32_t tiles, int32_t count, int32_t split, kbmla_split_range *range);
int32_t kbmla_work_list_index(const kbmla_work_walk *walk);
void kbmla_work_list_tile(const kbmla_work_walk *walk, int32_t entry, kbmla_tile *tile);
void kbmla_work_list_current(const kbmla_work_walk *walk, kbmla_tile *tile);
void kbmla_work_list_advance(kbmla_work_walk *walk, int32_t count);
int32_t kbmla_static_size(const kbmla_static_walk *walk);
void kbmla_static_current(const kbmla_static_walk *walk, kbmla_tile *tile);
void kbmla_static_advance(kbmla_static_walk *walk, int32_t count);
void kbmla_static_grid(const kbmla_static_walk *walk, int32_t max_clusters, int32_t cluster_volume,
                       int32_t grid[3]);

void kbmla_split_range_of(int32_t tiles, int32_t count, int32_t split, kbmla_split_range *range) {
    *range = kbmla_split_bounds(tiles, count, split);
}

int32_t kbmla_work_list_index(const kbmla_work_walk *walk) {
    return kbmla_work_walk_index(walk);
}

void kbmla_work_list_tile(const kbmla_work_walk *walk, int32_t entry, kbmla_tile *tile) {
    *tile = kbmla_work_walk_tile(walk, entry);
}

void kbmla_work_list_current(const kbmla_work_walk *walk, kbmla_tile *tile) {
    *tile = kbmla_work_walk_current(walk);
}

void kbmla_work_list_advance(kbmla_work_walk *walk, int32_t count) {
    kbmla_work_walk_advance(walk, count);
}

int32_t kbmla_static_size(const kbmla_static_walk *walk) {
    return kbmla_static_walk_size(walk);
}

void kbmla_static_current(const kbmla_static_walk *walk, kbmla_tile *tile) {
    *tile = kbmla_static_walk_current(walk);
}

void kbmla_static_advance(kbmla_static_walk *walk, int32_t count) {
    kbmla_static_walk_advance(walk, count);
}

void kbmla_static_grid(const kbmla_static_walk *walk, int32_t max_clusters, int32_t cluster_volume,
                       int32_t grid[3]) {
    kbmla_static_walk_grid(walk, max_clusters, cluster_volume, grid);
}
