/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The balancing rule: one pure integer function of the lengths and the config, written once for
 * host and device. cpu_plan.c drives these functions serially and is the readable statement of the
 * rule; a device planner drives the same functions in parallel and gives the same plan bit for bit.
 *
 * Policy `balanced`:
 *   1. A handful of candidates say how to cut: the piece aimed at, as a multiple of the mean work
 *      per cluster, and how the quotient of a length and that piece is rounded. Candidate 0 cuts
 *      nothing, candidate 1 is sure to fit the list and the workspace.
 *   2. Each candidate is priced without building its list: its splits are counted in classes of
 *      like length, and the placement of step 3 turns these counts into the load of the fullest
 *      cluster. The cheapest wins, the first of equals.
 *   3. Entries are listed by class, longest first, row by row of the wave, every second row
 *      backwards so that a cluster that took a long entry takes a short one next. The last row,
 *      which may be incomplete, runs forwards and so starts where the rows before it left the
 *      least.
 *
 * The list gives every cluster floor or ceil of (entries / clusters) entries, and all splits of a
 * request are equally long: what the rule chooses are the counts. Roundings that cut requests of
 * like lengths differently are what fills the gaps of such a grid.
 *
 * A plan's time on a device is that of its dependent instructions. Hence quotients by exact floats,
 * 32 bits throughout, and inverses of all that a config fixes.
 */
#ifndef KBMLA_PLAN_RULE_H
#define KBMLA_PLAN_RULE_H

#include "rules.h"

enum {
    KBMLA_PLAN_MAX_CANDIDATES = 16,
    KBMLA_PLAN_CLASSES = 64,       /* of like length, by which splits are listed */
    KBMLA_PLAN_PIECE_CLASSES = 40, /* ... up to the piece aimed at; the rest are above it */
    KBMLA_PLAN_PRICE_CLASSES = 32  /* pairs of them, in which a candidate's splits are counted */
};

/* Prices, in nanoseconds on an H200 at 1.7 GHz: [m] measured, [d] derived or estimated. */
enum {
    KBMLA_PLAN_MEMORY_NS = 2116,    /* [m] 128 tokens for each of 132 SMs at 4.6 TB/s */
    KBMLA_PLAN_COMPUTE_NS = 1080,   /* [d] main loop over 128 tokens, 1 to 3 % above the times */
    KBMLA_PLAN_COMPUTE_ROW_NS = 26, /* [d] ... measured at 48 and 64 query rows of a CTA */
    KBMLA_PLAN_SWITCH_NS = 2600,    /* [d] between two entries: sums, query, first scores */
    KBMLA_PLAN_STORE_ALL_NS = 56,   /* [m] FP32 partial row, 2 KB, while all SMs store: 36 GB/s */
    KBMLA_PLAN_STORE_ROW_NS = 28,   /* [d] ... while at most half of them do */
    KBMLA_PLAN_REDUCE_NS = 1600,    /* [d] a reduce with work against one without */
    KBMLA_PLAN_REDUCE_ROW_PS = 410  /* [d] FP32 partial row at 5 TB/s; 4 to 6.8 measured */
};

/* One way to cut, in one word. The piece aimed at is p = mean work per cluster * piece / 32. */
typedef struct kbmla_plan_candidate {
    int32_t piece : 8; /* of p, in 32ths of the mean; not read of candidate 0 */
    int32_t shift : 6; /* eighths of p added to a length before the division by p rounds up; <= 0 */
    int32_t dither : 6; /* eighths of p added, times a fraction in [0, 1) that differs by request */
    int32_t snap : 6;   /* 16ths: where pieces would be shorter than snap/16 * p, aim at p/2 */
    int32_t phase : 6;  /* 16ths added to the fraction of `dither`, modulo 1 */
} kbmla_plan_candidate;

/* All that a plan needs beside the lengths. Made on the host, passed to a kernel by value. Inverses
 * are 2^32 / x rounded up, at most 2^32 - 1: a product's upper half is a quotient or one more. */
typedef struct kbmla_plan_rule {
    int32_t policy;
    int32_t num_requests;
    int32_t num_clusters;
    int32_t num_q_tiles;
    int32_t max_extra;      /* sum of count - 1, at most */
    int32_t max_slots;      /* sum of the counts of split requests, at most */
    int32_t min_tiles;      /* of a split */
    int32_t fixed_limit;    /* count of any request under policy `fixed`, at most */
    int32_t equal_limit;    /* count under policy `equal`, at most */
    int32_t direct_cost;    /* of an entry written to `out`, beside its tiles; 16ths of a tile */
    int32_t partial_cost;   /* of an entry written to the workspace; 16ths of a tile */
    int32_t reduce_cost;    /* of a step with any split; 16ths of a tile */
    int32_t slot_cost_256;  /* of a split of a split request in the reduce; 1/256 of the above */
    int32_t store_cost_256; /* of one beyond half a wave of partials; 1/256 of 16ths of a tile */
    uint32_t min_inverse;   /* of min_tiles, rounded down: a quotient by it is one less at most */
    uint32_t tail;          /* a tile's time once clusters run dry over that in a full wave */
    uint32_t clusters_inverse;
    uint32_t parts_inverse; /* of the number of pieces worth aiming at */
    uint32_t fit_inverse;   /* of the number of pieces sure to fit the list and the workspace */
    int32_t num_candidates;
    kbmla_plan_candidate candidates[KBMLA_PLAN_MAX_CANDIDATES];
} kbmla_plan_rule;

/* What a step's lengths give before any candidate is looked at. Lengths are balanced in units of
 * 2^shift tiles. The shift is 0 unless a request has 4 million tokens or all of them 2 billion. */
typedef struct kbmla_plan_step {
    int32_t longest; /* tiles of a request */
    int32_t shift;
    int32_t longest_unit; /* longest >> shift, below 2^15, at least 1 */
    int32_t work;         /* tiles of all requests * q tiles >> shift, below 2^24 */
} kbmla_plan_step;

KBMLA_HOST_DEVICE kbmla_plan_step kbmla_plan_measure(int64_t work, int32_t longest) {
    kbmla_plan_step step = {longest, 0, 1, 0};
    while ((work >> step.shift) >= (1 << 24) || (longest >> step.shift) >= (1 << 15))
        step.shift++;
    step.longest_unit = kbmla_max(longest >> step.shift, 1);
    step.work = (int32_t)(work >> step.shift);
    return step;
}

/* Length of a request in units: an empty one counts as one unit. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_units(const kbmla_plan_step *step, int32_t tiles) {
    return kbmla_max(tiles >> step->shift, 1);
}

/* ------------------------------------------------------------------ exact quotients */

KBMLA_HOST_DEVICE int32_t kbmla_mul_high(int32_t a, uint32_t b) {
    return (int32_t)(((uint64_t)(uint32_t)a * b) >> 32);
}

/* A number by which others are multiplied: numerator / divisor. */
typedef struct kbmla_ratio {
    int32_t numerator;
    int32_t divisor;
    float value; /* on a device: the quotient or up to 2^-21 of it more, never less */
} kbmla_ratio;

KBMLA_HOST_DEVICE kbmla_ratio kbmla_make_ratio(int32_t numerator, int32_t divisor) {
    kbmla_ratio ratio = {numerator, divisor, 0.0f};
#ifdef __CUDA_ARCH__
    /* The approximate inverse is off by 1 ulp at most. */
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)divisor));
    inverse = __int_as_float(__float_as_int(inverse) + 2);
    ratio.value = numerator == 1 ? inverse : __fmul_ru(inverse, (float)numerator);
#endif
    return ratio;
}

/* floor(a * ratio) for a >= 0, max(a, a * numerator) < 2^21. A quotient is a multiple of 1 /
 * divisor; the error, less than that, cannot reach the next integer. */
KBMLA_HOST_DEVICE int32_t kbmla_scale(int32_t a, kbmla_ratio ratio) {
#ifdef __CUDA_ARCH__
    /* From 2^23 on a float's bits count integers. */
    return __float_as_int(__fmaf_rz((float)a, ratio.value, 8388608.0f)) - 0x4B000000;
#else
    return (int32_t)((int64_t)a * ratio.numerator / ratio.divisor);
#endif
}

/* ------------------------------------------------------------------ counts of one request */

/* The most splits that leave each at least min_tiles tiles. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_limit(const kbmla_plan_rule *rule, int32_t tiles) {
    int32_t most = kbmla_mul_high(tiles, rule->min_inverse); /* or one less */
    most += tiles - most * rule->min_tiles >= rule->min_tiles;
    return kbmla_max(kbmla_min(most, KBMLA_MAX_SPLITS), 1);
}

/* Policy `equal`, the stock rule: the clusters shared evenly, whatever the lengths. Empty splits
 * are left out, so a request too short for the common count gets fewer. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_equal_count(const kbmla_plan_rule *rule, int32_t tiles,
                                                 const kbmla_plan_step *step) {
    int32_t common = kbmla_normalise_count(step->longest, rule->equal_limit);
    return kbmla_normalise_count(tiles, common);
}

/* Policy `fixed`: pieces of one length, from the request's own length alone. */
enum { KBMLA_PLAN_FIXED_TILES = 16 };
KBMLA_HOST_DEVICE int32_t kbmla_plan_fixed_count(const kbmla_plan_rule *rule, int32_t tiles) {
    int32_t piece = kbmla_max(KBMLA_PLAN_FIXED_TILES, rule->min_tiles);
    int32_t count = kbmla_min(kbmla_ceil_div(tiles, piece), rule->fixed_limit);
    return kbmla_normalise_count(tiles, kbmla_min(count, kbmla_plan_limit(rule, tiles)));
}

/* A candidate for the lengths of a step. */
typedef struct kbmla_plan_cut {
    int32_t piece;       /* p, in units */
    int32_t added;       /* to a length before it is divided by p */
    int32_t dither;      /* 8 times what the largest fraction adds */
    int32_t snap;        /* 16 times the units of the shortest piece */
    uint32_t phase;      /* of the fraction */
    kbmla_ratio pieces;  /* 1 / p; 0 where nothing is cut */
    kbmla_ratio classes; /* classes per unit */
} kbmla_plan_cut;

/* `candidate` is an index: 0 cuts nothing, 1 is sure to fit. */
KBMLA_HOST_DEVICE kbmla_plan_cut kbmla_plan_make_cut(const kbmla_plan_rule *rule,
                                                     const kbmla_plan_step *step, int32_t candidate,
                                                     kbmla_plan_candidate way) {
    /* In 32ths of a unit; beyond 2^26 p is limited below in any case. */
    int32_t mean = kbmla_min(kbmla_mul_high(step->work << 5, rule->parts_inverse), 1 << 26);
    int32_t piece = (int32_t)(((uint32_t)mean * (uint32_t)way.piece + 1023) >> 10);
    if (candidate == 1) /* count - 1 < units / piece */
        piece = kbmla_max(piece, kbmla_mul_high(step->work, rule->fit_inverse) + 1);
    /* Past the longest request a piece still says which requests a dither cuts. */
    piece = kbmla_min(kbmla_max(piece, rule->min_tiles >> step->shift), 4 * step->longest_unit);
    if (candidate == 0) /* pieces say nothing but the classes, which end at 3/2 of one */
        piece = (2 * step->longest_unit + 2) / 3;
    piece = kbmla_max(piece, 1);
    kbmla_plan_cut cut;
    cut.piece = piece;
    cut.added = kbmla_max(((way.shift * piece) >> 3) + piece - 1, 0);
    cut.dither = way.dither * piece;
    cut.snap = way.snap * piece;
    cut.phase = (uint32_t)way.phase << 28;
    cut.pieces = kbmla_make_ratio(1, piece);
    cut.classes = kbmla_make_ratio(KBMLA_PLAN_PIECE_CLASSES, piece);
    if (candidate == 0)
        cut.pieces = kbmla_make_ratio(0, 1);
    return cut;
}

/* A fraction of 2^29 spread evenly over any run of neighbouring requests (golden ratio). */
KBMLA_HOST_DEVICE uint32_t kbmla_plan_fraction(int32_t batch, uint32_t phase) {
    return ((uint32_t)batch * 0x9E3779B1u + phase) >> 3;
}

/* How a request is cut: all splits but the last are of `per` units. */
typedef struct kbmla_plan_part {
    int32_t count; /* splits, the last of which may be empty; prices take it as it is */
    int32_t per;
} kbmla_plan_part;

/* Units of a split but the last. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_per(int32_t units, int32_t count) {
    return kbmla_scale(units + count - 1, kbmla_make_ratio(1, count));
}

/* `limit` is that of the request. */
KBMLA_HOST_DEVICE kbmla_plan_part kbmla_plan_part_of(const kbmla_plan_cut *cut, int32_t batch,
                                                     int32_t units, int32_t limit) {
    kbmla_plan_part part;
    int32_t added =
        cut->added + kbmla_mul_high(cut->dither, kbmla_plan_fraction(batch, cut->phase));
    int32_t count = kbmla_scale(units + added, cut->pieces);
    int32_t snapped = kbmla_scale(2 * units + cut->piece - 1, cut->pieces);
    /* No branch: on a device that takes longer than the other quotient. */
    int32_t is_short = (16 * units < cut->snap * count) & (2 * units > cut->piece);
    count = is_short ? snapped : count;
    part.count = kbmla_max(kbmla_min(count, limit), 1);
    part.per = kbmla_plan_per(units, part.count);
    return part;
}

/* The count that leaves no split empty. It is cut into the same pieces. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_whole_count(int32_t units, int32_t per) {
    return kbmla_scale(units + per - 1, kbmla_make_ratio(1, per));
}

/* Class of a request's splits, 0 the shortest. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_class(kbmla_ratio classes, int32_t per) {
    return kbmla_min(kbmla_scale(per, classes), KBMLA_PLAN_CLASSES - 1);
}

/* Count under the other policies. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_policy_count(const kbmla_plan_rule *rule,
                                                  const kbmla_plan_step *step, int32_t tiles) {
    return rule->policy == KBMLA_POLICY_EQUAL ? kbmla_plan_equal_count(rule, tiles, step)
                                              : kbmla_plan_fixed_count(rule, tiles);
}

/* ------------------------------------------------------------------ price of a candidate */

/* What a pass over the requests sums up for one candidate, of one q tile. */
typedef struct kbmla_plan_sums {
    int32_t class_splits[KBMLA_PLAN_PRICE_CLASSES];
    int32_t class_weight[KBMLA_PLAN_PRICE_CLASSES];
} kbmla_plan_sums;

/* Weight of all splits of a request, in 16ths of a unit. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_weight(const kbmla_plan_rule *rule,
                                            const kbmla_plan_step *step, int32_t units,
                                            int32_t count) {
    int32_t direct = rule->direct_cost >> step->shift, partial = rule->partial_cost >> step->shift;
    return 16 * units + count * (count > 1 ? partial : direct);
}

/* What its price depends on. */
typedef struct kbmla_plan_totals {
    int32_t splits;  /* of one q tile */
    int32_t slots;   /* of one q tile */
    int32_t weight;  /* of one q tile */
    int32_t fullest; /* load of the fullest cluster */
} kbmla_plan_totals;

/* Price of a candidate in weights; INT32_MAX where it does not fit. Time is taken as that of a full
 * wave for the mean load, and beyond it as that of clusters which no longer share the memory. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_price(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                                           kbmla_plan_totals totals) {
    if (totals.splits - rule->num_requests > rule->max_extra || totals.slots > rule->max_slots)
        return INT32_MAX;
    int32_t mean = kbmla_mul_high(totals.weight * rule->num_q_tiles, rule->clusters_inverse);
    int32_t above = kbmla_max(totals.fullest - mean, 0);
    int32_t slots = totals.slots * rule->num_q_tiles;
    /* A balanced wave ends everywhere at once, and so do its last stores. */
    int32_t storing =
        kbmla_max(kbmla_min(2 * slots, 2 * rule->num_clusters) - rule->num_clusters, 0);
    int32_t fixed =
        rule->reduce_cost + ((slots * rule->slot_cost_256 + storing * rule->store_cost_256) >> 8);
    return mean + kbmla_mul_high(above, rule->tail) + (slots > 0 ? fixed >> step->shift : 0);
}

/* Average weight of the splits of a class, 0 of none. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_average(int32_t weight, int32_t splits) {
#ifdef __CUDA_ARCH__
    /* A quotient below 2^21 of floats is within one of it. */
    int32_t quotient = (int32_t)__fdividef((float)weight, (float)splits);
    int32_t rest = weight - quotient * splits;
    return splits > 0 ? quotient + (rest >= splits) - (rest < 0) : 0;
#else
    return splits > 0 ? weight / splits : 0;
#endif
}

/* ------------------------------------------------------------------ groups
 * A request's splits are listed in two groups: all but the last, of equal length, and the last,
 * which may be shorter. It makes a difference to few requests of many splits: other batches are
 * listed request by request. */

enum { KBMLA_PLAN_PAIRED_REQUESTS = 16 };

/* Groups of a step are numbered through: group index % per_request of request index / per_request.
 */
KBMLA_HOST_DEVICE int32_t kbmla_plan_groups_per_request(const kbmla_plan_rule *rule) {
    return rule->num_requests <= KBMLA_PLAN_PAIRED_REQUESTS ? 2 : 1;
}

typedef struct kbmla_plan_group {
    int32_t first_split;
    int32_t num_splits; /* may be 0 */
    int32_t length;     /* units of each, or of the longest */
} kbmla_plan_group;

/* `per` are the units of a split but the last. */
KBMLA_HOST_DEVICE kbmla_plan_group kbmla_plan_group_of(int32_t group, int32_t per_request,
                                                       int32_t units, int32_t count, int32_t per) {
    kbmla_plan_group result = {0, count + 1 - per_request, per};
    if (group > 0) {
        result.first_split = count - 1;
        result.num_splits = 1;
        result.length = kbmla_max(units - per * (count - 1), 0);
    }
    return result;
}

/* ------------------------------------------------------------------ placement
 * Ranks count entries longest first; positions are indices of the list. Row = position / clusters
 * is the turn of a cluster, position % clusters is the cluster. Rows run backwards when an odd
 * number of rows follows. */

KBMLA_HOST_DEVICE int32_t kbmla_plan_rows(int32_t entries, kbmla_ratio waves, int32_t clusters) {
    return kbmla_scale(entries + clusters - 1, waves);
}

KBMLA_HOST_DEVICE int32_t kbmla_plan_position(int32_t rank, int32_t rows, int32_t clusters,
                                              kbmla_ratio waves) {
    int32_t row = kbmla_scale(rank, waves), column = rank - row * clusters;
    return row * clusters + ((rows - 1 - row) & 1 ? clusters - 1 - column : column);
}

/* Index in the list of the entry of rank `rank`; the stock rule keeps the order of the batch. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_list_index(const kbmla_plan_rule *rule, int32_t rank,
                                                int32_t rows, kbmla_ratio waves) {
    return rule->policy == KBMLA_POLICY_EQUAL
               ? rank
               : kbmla_plan_position(rank, rows, rule->num_clusters, waves);
}

/* Class by which a plan of any policy is listed; the stock rule keeps the order of the batch. */
KBMLA_HOST_DEVICE kbmla_ratio kbmla_plan_list_classes(const kbmla_plan_rule *rule,
                                                      const kbmla_plan_step *step) {
    if (rule->policy == KBMLA_POLICY_EQUAL)
        return kbmla_make_ratio(0, 1);
    int32_t piece = kbmla_max(kbmla_ceil_div(step->longest, rule->fixed_limit),
                              kbmla_max(KBMLA_PLAN_FIXED_TILES, rule->min_tiles));
    piece = kbmla_min(piece >> step->shift, 4 * step->longest_unit);
    return kbmla_make_ratio(KBMLA_PLAN_PIECE_CLASSES, kbmla_max(piece, 1));
}

/* At the end of a class the weight of ranks falls by `fall`, and in one row the load of columns
 * changes: by `step` from column `at` on. `all` goes to every column. */
typedef struct kbmla_plan_end {
    int32_t all;
    int32_t at;
    int32_t step;
} kbmla_plan_end;

/* `ranks` entries are of this class or a longer one. */
KBMLA_HOST_DEVICE kbmla_plan_end kbmla_plan_end_of(int32_t ranks, int32_t fall, int32_t rows,
                                                   int32_t clusters, kbmla_ratio waves) {
    int32_t row = kbmla_scale(ranks, waves), rest = ranks - row * clusters;
    int32_t is_backward = (rows - 1 - row) & 1;
    kbmla_plan_end end;
    end.all = fall * (row + 1 - is_backward);
    end.at = is_backward ? clusters - rest : rest;
    end.step = is_backward ? fall : -fall;
    return end;
}

/* ------------------------------------------------------------------ the rule of a config, host */

/* Time of one KV tile of a q tile in a full wave, in nanoseconds: the longer of memory and compute,
 * and a third of what the shorter exceeds 3/4 of it, since they do not overlap perfectly. */
static inline int32_t kbmla_plan_tile_ns(int32_t memory_ns, int32_t compute_ns) {
    int32_t longer = kbmla_max(memory_ns, compute_ns), shorter = kbmla_min(memory_ns, compute_ns);
    return longer + kbmla_max(0, shorter - longer * 3 / 4) / 3;
}

/*
 * Candidates 1 and up, chosen greedily and then by exchange over batches of traces, log-normals,
 * one-long-many-short and equal lengths on the model of benchmarks/simulate_plan.py, each time with
 * the plan that the prices pick; the first of a table is sure to fit, with 0 as short as that
 * allows. q tiles of more than 64 rows have half as many clusters and, for want of workspace, about
 * two pieces for each, so that much depends on how well pieces fill a cluster or half of it. Large
 * batches are even by the number of their requests and gain from short pieces; of theirs the best
 * are first, since the largest look at three.
 */
static const kbmla_plan_candidate kbmla_plan_wide[] = {
    {0, 0, 0, 0, 0},   {9, -2, 0, 0, 0},   {28, 0, 3, 0, 1},  {36, 0, 8, 0, 11}, {16, -5, 0, 11, 0},
    {18, -2, 0, 0, 0}, {33, -8, 19, 0, 4}, {17, -5, 4, 0, 0}, {19, 0, 0, 9, 0},  {37, 0, 0, 13, 0},
    {37, 0, 4, 12, 9}, {33, 0, 0, 0, 0},   {23, 0, 0, 0, 0},  {35, 0, 3, 13, 1}, {37, 0, 0, 9, 0},
};
static const kbmla_plan_candidate kbmla_plan_narrow[] = {
    {0, 0, 0, 0, 0},     {12, 0, 1, 13, 0},  {21, -8, 12, 15, 2},  {35, 0, 0, 0, 0},
    {33, 0, 0, 0, 0},    {36, 0, 0, 9, 0},   {34, 0, 1, 10, 5},    {17, -2, 0, 0, 0},
    {16, -7, 2, 11, 10}, {16, -6, 3, 9, 13}, {19, -8, 15, 10, 11}, {16, -4, 1, 0, 12},
    {39, 0, 0, 11, 0},   {37, 0, 6, 0, 5},   {25, -5, 0, 10, 0},
};
static const kbmla_plan_candidate kbmla_plan_large[] = {
    {0, 0, 0, 0, 0},  {12, 0, 0, 0, 0},   {8, 0, 1, 0, 0},    {14, 0, 0, 0, 0},
    {24, 0, 0, 0, 0}, {12, -8, 10, 0, 3}, {18, -8, 4, 14, 4},
};

/* Fills the candidates of a step of `num_requests`. Their number is a power of two and keeps the
 * pairs (candidate, request) of a step to a few thousand: they are much of a device's time. */
static inline void kbmla_plan_set_candidates(kbmla_plan_rule *rule, int32_t q_tile_rows) {
    int32_t requests = rule->num_requests;
    const kbmla_plan_candidate *from = requests > 128     ? kbmla_plan_large
                                       : q_tile_rows > 64 ? kbmla_plan_wide
                                                          : kbmla_plan_narrow;
    rule->num_candidates = requests <= 128 ? 16 : requests <= 512 ? 8 : 4;
    const kbmla_plan_candidate uncut = {0, 0, 0, 0, 0};
    for (int32_t i = 0; i < KBMLA_PLAN_MAX_CANDIDATES; i++)
        rule->candidates[i] = i >= 1 && i < rule->num_candidates ? from[i - 1] : uncut;
}

/* 2^32 / x rounded up, or the largest number. */
static inline uint32_t kbmla_plan_inverse(int32_t x) {
    return x > 1 ? (uint32_t)(((1ull << 32) + (uint32_t)x - 1) / (uint32_t)x) : UINT32_MAX;
}

static inline kbmla_plan_rule kbmla_make_plan_rule(const kbmla_config *config,
                                                   const kbmla_sizes *sizes, int32_t num_requests) {
    kbmla_plan_rule rule;
    int32_t q_tiles = sizes->num_q_tiles;
    int32_t all_tiles = kbmla_max(num_requests, 1) * q_tiles;
    rule.policy = config->policy;
    rule.num_requests = num_requests;
    rule.num_clusters = config->num_clusters;
    rule.num_q_tiles = q_tiles;
    rule.max_extra = sizes->max_extra / q_tiles;
    rule.max_slots = sizes->max_partials / q_tiles;
    rule.min_tiles = kbmla_ceil_div(config->min_split_tokens, KBMLA_TILE_TOKENS);

    /* The same count for every request must fit the list and the workspace. */
    int32_t most = kbmla_min(1 + sizes->max_extra / all_tiles, sizes->max_partials / all_tiles);
    rule.equal_limit = kbmla_max(1, kbmla_min(most, config->num_clusters / all_tiles));
    rule.fixed_limit = KBMLA_FIXED_SPLITS;

    /* A q tile of more than 64 rows is shared by two CTAs. */
    int32_t ctas = sizes->q_tile_rows > 64 ? 2 : 1;
    int32_t cta_rows = kbmla_ceil_div(sizes->q_tile_rows, ctas);
    int32_t memory_ns = KBMLA_PLAN_MEMORY_NS / ctas;
    int32_t compute_ns = KBMLA_PLAN_COMPUTE_NS + KBMLA_PLAN_COMPUTE_ROW_NS * cta_rows;
    int32_t tile_ns = kbmla_plan_tile_ns(memory_ns, compute_ns);
    int32_t partial_ns = KBMLA_PLAN_STORE_ROW_NS * cta_rows / (config->partial_fp16 ? 2 : 1);
    int32_t slot_ps =
        KBMLA_PLAN_REDUCE_ROW_PS * sizes->q_tile_rows / (config->partial_fp16 ? 2 : 1);
    rule.direct_cost =
        16 * (KBMLA_PLAN_SWITCH_NS + KBMLA_PLAN_STORE_ROW_NS * cta_rows / 2) / tile_ns;
    rule.partial_cost = 16 * (KBMLA_PLAN_SWITCH_NS + partial_ns) / tile_ns;
    rule.tail = (uint32_t)(kbmla_min(255, 256 * compute_ns / tile_ns)) << 24;
    int32_t store_all_ns =
        partial_ns * (KBMLA_PLAN_STORE_ALL_NS - KBMLA_PLAN_STORE_ROW_NS) / KBMLA_PLAN_STORE_ROW_NS;
    rule.store_cost_256 = 16 * 256 * store_all_ns / tile_ns / config->num_clusters;
    rule.reduce_cost = 16 * KBMLA_PLAN_REDUCE_NS / tile_ns;
    rule.slot_cost_256 = (int32_t)((int64_t)slot_ps * 16 * 256 / 1000 / tile_ns);

    rule.min_inverse =
        (uint32_t)((rule.min_tiles > 1 ? 1ull << 32 : UINT32_MAX) / (uint32_t)rule.min_tiles);
    rule.clusters_inverse = kbmla_plan_inverse(config->num_clusters);
    int32_t parts = kbmla_min(config->num_clusters, kbmla_max(sizes->max_extra, 1));
    rule.parts_inverse = kbmla_plan_inverse(parts);
    /* A request of `count` splits takes count - 1 spare entries of the list, and slots for twice as
     * many at most, which may be fewer only where the workspace was cut short. */
    int32_t fit = sizes->max_extra;
    if (sizes->max_partials < kbmla_min(2 * fit, all_tiles + fit))
        fit = sizes->max_partials / 2;
    rule.fit_inverse = kbmla_plan_inverse(fit);

    kbmla_plan_set_candidates(&rule, sizes->q_tile_rows);
    return rule;
}

#endif
