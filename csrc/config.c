/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pure integer rules that follow from a config: q tiles, entries a plan may hold, length of the
 * work list, layout of the workspace. All backends size and address their buffers through here.
 */
#include "internal.h"

enum {
    MAX_CAPACITY = 1 << 20,
    MAX_CLUSTERS = 1 << 12,
    ROW_GRANULE = 8,    /* q tiles are cut at multiples of it: the step of a tensor-core tile */
    PARTIAL_ALIGN = 256 /* bytes; start of partial_lse */
};

static kbmla_status check_range(kbmla_error *err, const char *name, int32_t value, int32_t least,
                                int32_t most) {
    RETURN_IF(value < least || value > most, err, KBMLA_INVALID_ARGUMENT,
              "%s: expected %d..%d, got %d", name, least, most, value);
    return KBMLA_OK;
}

static int is_power_of_two_up_to_256(float x) {
    for (int power = 1; power <= 256; power *= 2)
        if (x == (float)power)
            return 1;
    return 0;
}

kbmla_status kbmla_config_check(const kbmla_config *config, kbmla_error *err) {
    RETURN_IF(config == NULL, err, KBMLA_INVALID_ARGUMENT, "config: expected a pointer, got NULL");
    RETURN_IF(config->struct_size != sizeof *config, err, KBMLA_INVALID_ARGUMENT,
              "config.struct_size: expected %zu, got %zu (was it filled by KBMLA_CONFIG_INIT?)",
              sizeof *config, config->struct_size);
    RETURN_IF(config->num_heads > KBMLA_MAX_HEADS, err, KBMLA_UNSUPPORTED,
              "heads: expected 1..%d, got %d", KBMLA_MAX_HEADS, config->num_heads);
    FORWARD_IF_ERROR(check_range(err, "heads", config->num_heads, 1, KBMLA_MAX_HEADS));
    FORWARD_IF_ERROR(check_range(err, "q", config->q_len, 1, KBMLA_MAX_ROWS));
    RETURN_IF(config->num_heads * config->q_len > KBMLA_MAX_ROWS, err, KBMLA_INVALID_ARGUMENT,
              "q: expected heads * q <= %d, got %d * %d", KBMLA_MAX_ROWS, config->num_heads,
              config->q_len);
    FORWARD_IF_ERROR(check_range(err, "requests", config->max_requests, 1, KBMLA_MAX_REQUESTS));
    FORWARD_IF_ERROR(check_range(err, "clusters", config->num_clusters, 1, MAX_CLUSTERS));
    FORWARD_IF_ERROR(check_range(err, "capacity", config->capacity, 0, MAX_CAPACITY));
    FORWARD_IF_ERROR(check_range(err, "min_split_tokens", config->min_split_tokens, 1, INT32_MAX));
    FORWARD_IF_ERROR(check_range(err, "policy", config->policy, 0, KBMLA_POLICY_FIXED));
    FORWARD_IF_ERROR(check_range(err, "backend", config->backend, 0, KBMLA_BACKEND_SM90));
    FORWARD_IF_ERROR(check_range(err, "causal", config->causal, 0, 1));
    FORWARD_IF_ERROR(check_range(err, "partial_fp16", config->partial_fp16, 0, 1));
    FORWARD_IF_ERROR(check_range(err, "reducer_d_tiles", config->reducer_d_tiles, 1, 2));
    RETURN_IF(!is_power_of_two_up_to_256(config->p_scale), err, KBMLA_INVALID_ARGUMENT,
              "p_scale: expected a power of two in 1..256, got %g", (double)config->p_scale);
    return KBMLA_OK;
}

/*
 * One budget for the scratch of a whole step, in slots: no plan fills more than (requests * q tiles
 * + clusters) full tiles of 128 rows would, whatever `capacity` allows. The planner keeps to it.
 */
static int32_t partial_budget(int64_t tiles, int64_t clusters, int32_t tile_rows) {
    return (int32_t)((tiles + clusters) * KBMLA_MAX_TILE_ROWS / tile_rows);
}

kbmla_status kbmla_config_sizes(const kbmla_config *config, kbmla_sizes *sizes, kbmla_error *err) {
    FORWARD_IF_ERROR(kbmla_config_check(config, err));
    RETURN_IF(sizes == NULL, err, KBMLA_INVALID_ARGUMENT, "sizes: expected a pointer, got NULL");
    int32_t rows = config->num_heads * config->q_len;
    int32_t num_q_tiles = kbmla_ceil_div(rows, KBMLA_MAX_TILE_ROWS);
    int32_t even = kbmla_ceil_div(rows, num_q_tiles);
    int32_t tiles = config->max_requests * num_q_tiles;

    sizes->rows = rows;
    sizes->num_q_tiles = num_q_tiles;
    sizes->q_tile_rows = kbmla_ceil_div(even, ROW_GRANULE) * ROW_GRANULE;
    int32_t budget = partial_budget(tiles, config->num_clusters, sizes->q_tile_rows);
    sizes->max_extra = kbmla_min(config->capacity, budget);
    /* Fixed counts must not depend on what else fits: there is room for the most of each. */
    if (config->policy == KBMLA_POLICY_FIXED) {
        budget = tiles * KBMLA_FIXED_SPLITS;
        sizes->max_extra = tiles * (KBMLA_FIXED_SPLITS - 1);
    }
    sizes->list_len = tiles + sizes->max_extra + config->num_clusters + config->max_requests;
    /* A plan of e splits beyond the first of each request uses at most 2e slots, since each split
     * request adds its first split to those it counts, and at most one per entry. */
    int32_t most = kbmla_min(2 * sizes->max_extra, tiles + sizes->max_extra);
    sizes->max_partials = kbmla_min(most, budget);

    int64_t slot_rows = (int64_t)sizes->max_partials * sizes->q_tile_rows;
    int64_t o_bytes = slot_rows * KBMLA_HEAD_DIM_V * (config->partial_fp16 ? 2 : 4);
    sizes->partial_lse_offset = (o_bytes + PARTIAL_ALIGN - 1) / PARTIAL_ALIGN * PARTIAL_ALIGN;
    sizes->workspace_bytes = sizes->partial_lse_offset + slot_rows * (int64_t)sizeof(float);
    return KBMLA_OK;
}
