/* SPDX-License-Identifier: Apache-2.0 */
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
    kbmla_plan_group groups[2 * KBMLA_MAX_REQUESTS];
    int32_t classes[2 * KBMLA_MAX_REQUESTS]; /* of groups */
    int32_t order[2 * KBMLA_MAX_REQUESTS];   /* groups, the longest first */
} plan_state;

static kbmla_plan_step measure_step(const kbmla_plan_rule *rule, const int32_t *tiles) {
    int64_t work = 0;
    int32_t longest = 0;
    for (int32_t b = 0; b < rule->num_requests; b++) {
        work += (int64_t)tiles[b] * rule->num_q_tiles;
        longest = kbmla_max(longest, tiles[b]);
    }
    return kbmla_plan_measure(work, longest);
}

static kbmla_plan_part part_of(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                               const kbmla_plan_cut *cut, int32_t batch, int32_t tiles) {
    return kbmla_plan_part_of(cut, batch, kbmla_plan_units(step, tiles),
                              kbmla_plan_limit(rule, tiles));
}

/* Load of the fullest cluster when every entry weighs the average of its class. Loads differ
 * between neighbouring columns only where a class ends. */
static int32_t fullest_cluster(const kbmla_plan_rule *rule, const kbmla_plan_sums *sums,
                               int32_t splits) {
    int32_t clusters = rule->num_clusters;
    int32_t rows = kbmla_ceil_div(splits * rule->num_q_tiles, clusters);
    kbmla_ratio waves = kbmla_make_ratio(1, clusters);
    kbmla_plan_end ends[KBMLA_PLAN_PRICE_CLASSES];
    int32_t ranks = 0, first = 0, fullest = 0;
    for (int32_t i = KBMLA_PLAN_PRICE_CLASSES - 1; i >= 0; i--) {
        int32_t weight = kbmla_plan_average(sums->class_weight[i], sums->class_splits[i]);
        int32_t lighter =
            i > 0 ? kbmla_plan_average(sums->class_weight[i - 1], sums->class_splits[i - 1]) : 0;
        ranks += sums->class_splits[i] * rule->num_q_tiles;
        ends[i] = kbmla_plan_end_of(ranks, weight - lighter, rows, clusters, waves);
        first += ends[i].all;
    }
    for (int32_t i = -1; i < KBMLA_PLAN_PRICE_CLASSES; i++) {
        int32_t column = i < 0 ? 0 : ends[i].at, load = first;
        for (int32_t j = 0; j < KBMLA_PLAN_PRICE_CLASSES; j++)
            load += ends[j].at <= column ? ends[j].step : 0;
        if (column < clusters)
            fullest = kbmla_max(fullest, load);
    }
    return fullest;
}

static int32_t candidate_price(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                               int32_t candidate, const int32_t *tiles) {
    kbmla_plan_cut cut = kbmla_plan_make_cut(rule, step, candidate, rule->candidates[candidate]);
    kbmla_plan_sums sums = {0};
    kbmla_plan_totals totals = {0, 0, 0, 0};
    for (int32_t b = 0; b < rule->num_requests; b++) {
        kbmla_plan_part part = part_of(rule, step, &cut, b, tiles[b]);
        int32_t class_index = kbmla_plan_class(cut.classes, part.per) / 2;
        int32_t weight =
            kbmla_plan_weight(rule, step, kbmla_plan_units(step, tiles[b]), part.count);
        sums.class_splits[class_index] += part.count;
        sums.class_weight[class_index] += weight;
        totals.splits += part.count;
        totals.slots += part.count > 1 ? part.count : 0;
        totals.weight += weight;
    }
    if (totals.splits - rule->num_requests > rule->max_extra || totals.slots > rule->max_slots)
        return INT32_MAX;
    totals.fullest = fullest_cluster(rule, &sums, totals.splits);
    return kbmla_plan_price(rule, step, totals);
}

static int32_t cheapest_candidate(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                                  const int32_t *tiles) {
    int32_t best = 0, best_price = INT32_MAX;
    for (int32_t candidate = 0; candidate < rule->num_candidates; candidate++) {
        int32_t price = candidate_price(rule, step, candidate, tiles);
        if (price < best_price) {
            best = candidate;
            best_price = price;
        }
    }
    return best;
}

static void choose_counts(const kbmla_plan_rule *rule, plan_state *state) {
    kbmla_plan_step step = measure_step(rule, state->tiles);
    int32_t is_balanced = rule->policy == KBMLA_POLICY_BALANCED;
    int32_t best = is_balanced ? cheapest_candidate(rule, &step, state->tiles) : 0;
    kbmla_plan_cut cut = kbmla_plan_make_cut(rule, &step, best, rule->candidates[best]);
    kbmla_ratio classes = is_balanced ? cut.classes : kbmla_plan_list_classes(rule, &step);
    int32_t per_request = kbmla_plan_groups_per_request(rule);
    for (int32_t b = 0; b < rule->num_requests; b++) {
        int32_t tiles = state->tiles[b], units = kbmla_plan_units(&step, tiles);
        int32_t count =
            is_balanced ? kbmla_plan_whole_count(units, part_of(rule, &step, &cut, b, tiles).per)
                        : kbmla_plan_policy_count(rule, &step, tiles);
        count = step.shift > 0 ? kbmla_normalise_count(tiles, count) : count;
        state->counts[b] = count;
        for (int32_t i = 0; i < per_request; i++) {
            kbmla_plan_group *group = &state->groups[b * per_request + i];
            *group =
                kbmla_plan_group_of(i, per_request, units, count, kbmla_plan_per(units, count));
            state->classes[b * per_request + i] = kbmla_plan_class(classes, group->length);
        }
    }
}

/* A counting sort of the groups by class; stable. */
static void sort_groups(const kbmla_plan_rule *rule, plan_state *state) {
    int32_t starts[KBMLA_PLAN_CLASSES + 1] = {0};
    int32_t groups = rule->num_requests * kbmla_plan_groups_per_request(rule);
    for (int32_t i = 0; i < groups; i++)
        starts[KBMLA_PLAN_CLASSES - state->classes[i]]++;
    for (int32_t i = 1; i <= KBMLA_PLAN_CLASSES; i++)
        starts[i] += starts[i - 1];
    for (int32_t i = 0; i < groups; i++)
        state->order[starts[KBMLA_PLAN_CLASSES - 1 - state->classes[i]]++] = i;
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
    kbmla_ratio waves = kbmla_make_ratio(1, rule->num_clusters);
    int32_t rows = kbmla_plan_rows(entries, waves, rule->num_clusters);
    int32_t per_request = kbmla_plan_groups_per_request(rule);
    for (int32_t i = 0; i < num_requests * per_request; i++) {
        kbmla_plan_group group = state->groups[state->order[i]];
        int32_t batch = state->order[i] / per_request;
        for (int32_t split = 0; split < group.num_splits; split++)
            for (int32_t q_tile = 0; q_tile < rule->num_q_tiles; q_tile++)
                work[kbmla_plan_list_index(rule, rank++, rows, waves)] =
                    kbmla_pack_entry(q_tile, batch, group.first_split + split, num_requests);
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
