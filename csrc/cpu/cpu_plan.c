/*
 * The planner, serially: the readable statement of the balancing rule. What each step computes is
 * in plan_rule.h, shared with the device; this file is the order of the steps. Everything is
 * integer, so that a parallel driver of the same functions gives the same list.
 */
#include "../internal.h"
#include "../plan_rule.h"

/* The step's lengths in tiles and what the rule decided for each request. */
typedef struct plan_state {
    int32_t tiles[KBMLA_MAX_REQUESTS];
    int32_t counts[KBMLA_MAX_REQUESTS];
    int32_t order[2 * KBMLA_MAX_REQUESTS]; /* groups of splits, the longest first */
} plan_state;

static kbmla_plan_step measure_step(const kbmla_plan_rule *rule, const int32_t *tiles) {
    kbmla_plan_step step = {0, 0, 0};
    for (int32_t b = 0; b < rule->num_requests; b++) {
        step.work += (int64_t)tiles[b] * rule->num_q_tiles;
        step.max_tiles = kbmla_max(step.max_tiles, tiles[b]);
    }
    step.weight_shift = kbmla_plan_weight_shift(step.work);
    return step;
}

static int32_t candidate_price(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                               int32_t candidate, const int32_t *tiles) {
    kbmla_divisor piece = kbmla_plan_piece(rule, step, candidate);
    kbmla_plan_sums sums = {0};
    for (int32_t b = 0; b < rule->num_requests; b++) {
        kbmla_plan_part parts[2];
        sums.slots += kbmla_plan_parts(rule, step, candidate, piece, b, tiles[b], parts);
        for (int32_t i = 0; i < 2; i++) {
            sums.class_entries[parts[i].class_index] += parts[i].entries;
            sums.class_weight[parts[i].class_index] += parts[i].weight;
        }
    }
    return kbmla_plan_price(rule, step, kbmla_plan_total(rule, &sums));
}

static void choose_counts(const kbmla_plan_rule *rule, plan_state *state) {
    kbmla_plan_step step = measure_step(rule, state->tiles);
    int32_t best = 0, best_price = INT32_MAX;
    if (rule->policy == KBMLA_POLICY_BALANCED)
        for (int32_t candidate = 0; candidate < rule->num_candidates; candidate++) {
            int32_t price = candidate_price(rule, &step, candidate, state->tiles);
            if (price < best_price) {
                best = candidate;
                best_price = price;
            }
        }
    kbmla_divisor piece = kbmla_plan_piece(rule, &step, best);
    for (int32_t b = 0; b < rule->num_requests; b++) {
        int32_t tiles = state->tiles[b];
        state->counts[b] =
            rule->policy == KBMLA_POLICY_EQUAL   ? kbmla_plan_equal_count(rule, tiles, &step)
            : rule->policy == KBMLA_POLICY_FIXED ? kbmla_plan_fixed_count(rule, tiles)
                                                 : kbmla_plan_count(rule, best, piece, b, tiles);
    }
}

static kbmla_plan_group group_of(const plan_state *state, int32_t index) {
    return kbmla_plan_group_of(index, state->tiles[index >> 1], state->counts[index >> 1]);
}

/* A counting sort of the groups by the length of their entries; stable. */
static void sort_groups(const kbmla_plan_rule *rule, plan_state *state) {
    int32_t longest = 1, ends[KBMLA_PLAN_SORT_CLASSES] = {0};
    for (int32_t b = 0; b < rule->num_requests; b++)
        longest = kbmla_max(longest, kbmla_ceil_div(state->tiles[b], state->counts[b]));
    kbmla_divisor scale = kbmla_make_divisor((uint32_t)longest);
    for (int32_t i = 0; i < 2 * rule->num_requests; i++)
        ends[kbmla_plan_sort_class(rule, scale, group_of(state, i).per)]++;
    for (int32_t i = 0, before = 0; i < KBMLA_PLAN_SORT_CLASSES; i++) {
        int32_t in_class = ends[i];
        ends[i] = before;
        before += in_class;
    }
    for (int32_t i = 0; i < 2 * rule->num_requests; i++)
        state->order[ends[kbmla_plan_sort_class(rule, scale, group_of(state, i).per)]++] = i;
}

static void write_list(const kbmla_plan_rule *rule, const kbmla_sizes *sizes, int32_t max_requests,
                       const plan_state *state, int32_t *work) {
    int32_t num_requests = rule->num_requests, entries = 0, rank = 0, slot = 0;
    int32_t *bases = work + sizes->list_len - max_requests;
    for (int32_t i = 0; i < sizes->list_len; i++)
        work[i] = -1;
    for (int32_t b = 0; b < num_requests; b++) {
        int32_t request_entries = state->counts[b] * rule->num_q_tiles;
        entries += request_entries;
        if (state->counts[b] > 1) {
            bases[b] = ~slot;
            slot += request_entries;
        }
    }
    for (int32_t i = 0; i < 2 * num_requests; i++) {
        kbmla_plan_group group = group_of(state, state->order[i]);
        for (int32_t split = 0; split < group.num_splits; split++)
            for (int32_t q_tile = 0; q_tile < rule->num_q_tiles; q_tile++)
                work[kbmla_plan_list_index(rule, rank++, entries)] =
                    kbmla_pack_entry(q_tile, group.batch, group.first_split + split, num_requests);
    }
}

kbmla_status kbmla_cpu_plan(const kbmla_config *config, const kbmla_sizes *sizes,
                            const kbmla_plan_args *args, struct CUstream_st *stream,
                            kbmla_error *err) {
    (void)stream;
    (void)err;
    plan_state state;
    kbmla_plan_rule rule = kbmla_make_plan_rule(config, sizes, args->num_requests);
    for (int32_t b = 0; b < args->num_requests; b++)
        state.tiles[b] = kbmla_num_tiles(args->lengths[b]);
    choose_counts(&rule, &state);
    sort_groups(&rule, &state);
    for (int32_t b = 0; b < args->num_requests; b++)
        args->counts[b] = state.counts[b];
    write_list(&rule, sizes, config->max_requests, &state, args->work);
    return KBMLA_OK;
}
