/*
 * The balancing rule: one pure integer function of the lengths and the config, written once for
 * host and device. cpu_plan.c drives these functions serially and is the readable statement of the
 * rule; a device planner drives the same functions with a warp per candidate and a thread per
 * request or entry, and gives the same plan bit for bit.
 *
 * Policy `balanced`:
 *   1. A handful of candidates say how to cut: the piece aimed at, as a multiple of the mean work
 *      per cluster, and how the quotient of a length and that piece is rounded. Candidate 0 cuts
 *      nothing, candidate 1 is sure to fit the list and the workspace.
 *   2. Each candidate is priced without building its list: its entries are counted in classes of
 *      like length, and the placement of step 3 turns these counts into the load of the fullest
 *      cluster. The cheapest wins, the first of equals.
 *   3. Entries are listed longest first, row by row of the wave, every second row backwards so that
 *      a cluster that took a long entry takes a short one next. The last row, which may be
 *      incomplete, runs forwards and so starts where the rows before it left the least.
 *
 * The list gives every cluster floor or ceil of (entries / clusters) entries, and all splits of a
 * request are equally long: what the rule chooses are the counts. Roundings that cut requests of
 * like lengths differently are what fills the gaps of such a grid.
 */
#ifndef KBMLA_PLAN_RULE_H
#define KBMLA_PLAN_RULE_H

#include "rules.h"

enum {
    KBMLA_PLAN_MAX_CANDIDATES = 32,
    KBMLA_PLAN_CLASSES = 32,     /* in which a candidate's entries are counted: one lane each */
    KBMLA_PLAN_SORT_CLASSES = 64 /* of the final order */
};

/* Prices, in nanoseconds on an H200 at 1.7 GHz. [m] measured, [d] derived from
 * measurements or estimated, to be tuned again on the finished kernels. */
enum {
    KBMLA_PLAN_MEMORY_NS = 2116,    /* [m] 128 tokens for each of 132 SMs at 4.6 TB/s */
    KBMLA_PLAN_COMPUTE_NS = 1024,   /* [d] main loop over 128 tokens, line through the clocks */
    KBMLA_PLAN_COMPUTE_ROW_NS = 19, /* [d] ... measured at 16 to 64 query rows of a CTA */
    KBMLA_PLAN_SWITCH_NS = 650,     /* [d] between two entries: drain, query, first KV tile */
    KBMLA_PLAN_STORE_ALL_NS = 56,   /* [m] FP32 partial row, 2 KB, while all SMs store: 36 GB/s */
    KBMLA_PLAN_STORE_ROW_NS = 28,   /* [d] ... while at most half of them do */
    KBMLA_PLAN_REDUCE_NS = 600,     /* [d] a reduce with work against one without */
    KBMLA_PLAN_REDUCE_ROW_PS = 410  /* [d] FP32 partial row at 5 TB/s; 4 to 6.8 measured */
};

/* One way to cut. The piece aimed at is p = mean work per cluster * piece / 32. */
typedef struct kbmla_plan_candidate {
    int8_t piece;  /* of p, in 32ths of the mean; 0: cut nothing */
    int8_t shift;  /* eighths of p added to a length before the division by p rounds up */
    int8_t dither; /* eighths of p added, times a fraction in [0, 1) that differs by request */
    int8_t snap;   /* 16ths: where pieces would be shorter than snap/16 * p, aim at p/2; 0: never */
    int8_t phase;  /* 16ths added to the fraction of `dither`, modulo 1 */
} kbmla_plan_candidate;

/* All that a plan needs beside the lengths. Made on the host, passed to a kernel by value. */
typedef struct kbmla_plan_rule {
    int32_t policy;
    int32_t num_requests;
    int32_t num_clusters;
    int32_t num_q_tiles;
    int32_t max_extra;     /* sum of (count - 1) * q tiles, at most */
    int32_t max_partials;  /* sum of count * q tiles over split requests, at most */
    int32_t min_tiles;     /* of a split */
    int32_t fixed_limit;   /* count of any request under policy `fixed`, at most */
    int32_t equal_limit;   /* count under policy `equal`, at most */
    int32_t direct_cost;   /* of an entry written to `out`, beside its tiles; 16ths of a tile */
    int32_t partial_cost;  /* of an entry written to the workspace; 16ths of a tile */
    int32_t tail_256;      /* a tile's time once clusters run dry over that in a full wave, /256 */
    int32_t store_cost;    /* of partials that all clusters store at once; 16ths of a tile */
    int32_t reduce_cost;   /* of a step with any split; 16ths of a tile */
    int32_t slot_cost_256; /* of a partial slot in the reduce; 1/256 of 16ths of a tile */
    int32_t num_candidates;
    kbmla_plan_candidate candidates[KBMLA_PLAN_MAX_CANDIDATES];
} kbmla_plan_rule;

/* What a step's lengths give before any candidate is looked at. */
typedef struct kbmla_plan_step {
    int64_t work;         /* tiles of all requests * q tiles */
    int32_t max_tiles;    /* of a request */
    int32_t weight_shift; /* entry weights are 16ths of a tile >> weight_shift: sums fit 30 bits */
} kbmla_plan_step;

/* Weights leave room for sums of all entries' tiles and of their fixed costs in 30 bits. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_weight_shift(int64_t work) {
    int32_t shift = 0;
    while ((work >> shift) >= (1 << 24))
        shift++;
    return shift;
}

/* ------------------------------------------------------------------ division by one number */

typedef struct kbmla_divisor {
    uint32_t divisor;
    uint32_t inverse; /* floor(2^32 / divisor), 2^32 - 1 for 1 */
} kbmla_divisor;

KBMLA_HOST_DEVICE kbmla_divisor kbmla_make_divisor(uint32_t divisor) {
    kbmla_divisor result = {divisor, UINT32_MAX};
    if (divisor > 1) /* 2^32 is one more than the largest 32-bit number */
        result.inverse = UINT32_MAX / divisor + ((divisor & (divisor - 1)) == 0);
    return result;
}

/* floor(a * inverse / 2^32): at most one below floor(a / divisor). */
KBMLA_HOST_DEVICE uint32_t kbmla_divide_below(uint32_t a, kbmla_divisor d) {
    return (uint32_t)(((uint64_t)a * d.inverse) >> 32);
}

KBMLA_HOST_DEVICE uint32_t kbmla_divide(uint32_t a, kbmla_divisor d) {
    uint32_t quotient = kbmla_divide_below(a, d);
    return quotient + (a - quotient * d.divisor >= d.divisor);
}

/* Of a sum over a step, which usually fits 31 bits, where a division costs a fraction. */
KBMLA_HOST_DEVICE int64_t kbmla_plan_ceil_div64(int64_t a, int32_t b) {
    return a <= INT32_MAX ? kbmla_ceil_div((int32_t)a, b) : (a + b - 1) / b;
}

/* ------------------------------------------------------------------ counts of one request */

/* The most splits that leave each at least min_tiles tiles. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_limit(const kbmla_plan_rule *rule, int32_t tiles,
                                           int32_t count) {
    int32_t most = kbmla_min(kbmla_div(tiles, rule->min_tiles), KBMLA_MAX_SPLITS);
    return kbmla_normalise_count(tiles, kbmla_max(1, kbmla_min(count, most)));
}

/* Policy `equal`, the stock rule: the clusters shared evenly, whatever the lengths. Empty splits
 * are left out, so a request too short for the common count gets fewer. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_equal_count(const kbmla_plan_rule *rule, int32_t tiles,
                                                 const kbmla_plan_step *step) {
    int32_t common = kbmla_normalise_count(step->max_tiles, rule->equal_limit);
    return kbmla_normalise_count(tiles, common);
}

/* Policy `fixed`: pieces of one length, from the request's own length alone. */
enum { KBMLA_PLAN_FIXED_TILES = 16 };
KBMLA_HOST_DEVICE int32_t kbmla_plan_fixed_count(const kbmla_plan_rule *rule, int32_t tiles) {
    int32_t piece = kbmla_max(KBMLA_PLAN_FIXED_TILES, rule->min_tiles);
    return kbmla_plan_limit(rule, tiles,
                            kbmla_min(kbmla_ceil_div(tiles, piece), rule->fixed_limit));
}

/* The piece a candidate aims at, in tiles. `candidate` is its index: 0 cuts nothing. */
KBMLA_HOST_DEVICE kbmla_divisor kbmla_plan_piece(const kbmla_plan_rule *rule,
                                                 const kbmla_plan_step *step, int32_t candidate) {
    int64_t piece = step->max_tiles;
    if (candidate == 1 && rule->max_extra > 0) {
        /* count - 1 < tiles / piece and count <= 2 * (count - 1): both limits hold. */
        int64_t extra_piece = kbmla_plan_ceil_div64(step->work, rule->max_extra);
        int64_t slots_piece = kbmla_plan_ceil_div64(2 * step->work, rule->max_partials);
        piece = extra_piece > slots_piece ? extra_piece : slots_piece;
    } else if (candidate > 1) {
        int32_t parts = kbmla_min(rule->num_clusters, kbmla_max(rule->max_extra, 1)) * 32;
        piece = kbmla_plan_ceil_div64(step->work * rule->candidates[candidate].piece, parts);
    }
    /* Past the longest request a piece still says which requests a dither cuts. */
    int64_t most = 4 * (int64_t)step->max_tiles;
    piece = piece < most ? piece : most;
    return kbmla_make_divisor(
        (uint32_t)(piece > rule->min_tiles ? piece : (int64_t)rule->min_tiles));
}

/* A fraction in [0, 65536) spread evenly over any run of neighbouring requests (golden ratio). */
KBMLA_HOST_DEVICE int32_t kbmla_plan_dither(int32_t batch, int32_t phase) {
    return (int32_t)(((uint32_t)batch * 0x9E3779B1u + ((uint32_t)phase << 28)) >> 16);
}

/* Policy `balanced`: the count of request `batch` under a candidate. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_count(const kbmla_plan_rule *rule, int32_t candidate,
                                           kbmla_divisor piece, int32_t batch, int32_t tiles) {
    if (candidate == 0 || tiles == 0)
        return 1;
    kbmla_plan_candidate cut = rule->candidates[candidate];
    int64_t eighths = (int64_t)cut.shift * 65536 + cut.dither * kbmla_plan_dither(batch, cut.phase);
    int64_t added = (eighths * (int64_t)piece.divisor) >> 19;
    int64_t rounded = tiles + added + (int64_t)piece.divisor - 1;
    uint32_t count = rounded > 0 ? kbmla_divide((uint32_t)rounded, piece) : 0;
    if (16 * (int64_t)tiles < (int64_t)cut.snap * piece.divisor * count &&
        2 * (int64_t)tiles > piece.divisor)
        count = kbmla_divide(2 * (uint32_t)tiles + piece.divisor - 1, piece);
    return kbmla_plan_limit(rule, tiles, (int32_t)kbmla_min((int32_t)count, KBMLA_MAX_SPLITS));
}

/* ------------------------------------------------------------------ price of a candidate */

/* What a pass over the requests sums up for one candidate. */
typedef struct kbmla_plan_sums {
    int32_t slots;                             /* of split requests; q tiles included, as below */
    int32_t class_entries[KBMLA_PLAN_CLASSES]; /* class 0 holds the lightest */
    int32_t class_weight[KBMLA_PLAN_CLASSES];
} kbmla_plan_sums;

/* What its price depends on. */
typedef struct kbmla_plan_totals {
    int32_t entries;
    int32_t slots;
    int32_t weight;
    int32_t fullest; /* load of the fullest cluster */
} kbmla_plan_totals;

/* Weight of an entry of `per` tiles. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_weight(const kbmla_plan_rule *rule,
                                            const kbmla_plan_step *step, int32_t per,
                                            int32_t count) {
    int32_t cost = count > 1 ? rule->partial_cost : rule->direct_cost;
    return (16 * per + cost) >> step->weight_shift;
}

/* Class of an entry of `per` tiles where p is `piece`: 20 classes up to p, the rest above. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_class(kbmla_divisor piece, int32_t per) {
    uint64_t scaled = 20 * (uint64_t)piece.inverse;
    uint32_t inverse = scaled < UINT32_MAX ? (uint32_t)scaled : UINT32_MAX;
    uint32_t index = (uint32_t)(((uint64_t)(uint32_t)per * inverse) >> 32);
    return index < KBMLA_PLAN_CLASSES ? (int32_t)index : KBMLA_PLAN_CLASSES - 1;
}

/* What entries of one length and one request add to the sums. */
typedef struct kbmla_plan_part {
    int32_t class_index;
    int32_t entries;
    int32_t weight;
} kbmla_plan_part;

/* `splits` splits of `per` tiles of each q tile, of a request cut into `count`. */
KBMLA_HOST_DEVICE kbmla_plan_part kbmla_plan_part_of(const kbmla_plan_rule *rule,
                                                     const kbmla_plan_step *step,
                                                     kbmla_divisor piece, int32_t per,
                                                     int32_t count, int32_t splits) {
    kbmla_plan_part part;
    part.entries = splits * rule->num_q_tiles;
    part.weight = kbmla_plan_weight(rule, step, per, count) * part.entries;
    part.class_index = kbmla_plan_class(piece, per);
    return part;
}

/* The two parts of a request: all splits but the last, and the last, which may be shorter. Returns
 * its slots. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_parts(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                                           int32_t candidate, kbmla_divisor piece, int32_t batch,
                                           int32_t tiles, kbmla_plan_part parts[2]) {
    int32_t count = kbmla_plan_count(rule, candidate, piece, batch, tiles);
    int32_t per = kbmla_ceil_div(tiles, count);
    parts[0] = kbmla_plan_part_of(rule, step, piece, per, count, count - 1);
    parts[1] = kbmla_plan_part_of(rule, step, piece, tiles - per * (count - 1), count, 1);
    return count > 1 ? count * rule->num_q_tiles : 0;
}

/* ------------------------------------------------------------------ placement
 * Ranks count entries longest first; positions are indices of the list. Row = position / clusters
 * is the turn of a cluster, position % clusters is the cluster. */

/* Rows run backwards when an odd number of rows follows. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_row_column(int32_t row, int32_t rows, int32_t clusters,
                                                int32_t column) {
    return (rows - 1 - row) & 1 ? clusters - 1 - column : column;
}

KBMLA_HOST_DEVICE int32_t kbmla_plan_position(int32_t rank, int32_t entries, int32_t clusters) {
    int32_t row = kbmla_div(rank, clusters);
    int32_t rows = kbmla_ceil_div(entries, clusters);
    return row * clusters + kbmla_plan_row_column(row, rows, clusters, rank - row * clusters);
}

/* How many of the first `ranks` entries cluster `column` takes. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_taken(int32_t ranks, int32_t rows, int32_t clusters,
                                           int32_t column) {
    int32_t row = kbmla_div(ranks, clusters);
    return row + (kbmla_plan_row_column(row, rows, clusters, column) < ranks - row * clusters);
}

/* Load of a cluster when every entry weighs the average of its class. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_load(const kbmla_plan_sums *sums, int32_t entries,
                                          int32_t clusters, int32_t column) {
    int32_t rows = kbmla_ceil_div(entries, clusters);
    int32_t load = 0, ranks = 0, taken = 0;
    for (int32_t i = KBMLA_PLAN_CLASSES - 1; i >= 0; i--) {
        if (sums->class_entries[i] == 0)
            continue;
        ranks += sums->class_entries[i];
        int32_t next = kbmla_plan_taken(ranks, rows, clusters, column);
        load += (next - taken) * (sums->class_weight[i] / sums->class_entries[i]);
        taken = next;
    }
    return load;
}

/* Load of the fullest cluster. Loads change only where a class ends, so it is enough to look at
 * the clusters on both sides of each end. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_fullest(const kbmla_plan_sums *sums, int32_t entries,
                                             int32_t clusters) {
    int32_t rows = kbmla_ceil_div(entries, clusters);
    int32_t fullest = 0, ranks = 0;
    for (int32_t i = KBMLA_PLAN_CLASSES - 1; i >= 0; i--) {
        if (sums->class_entries[i] == 0)
            continue;
        ranks += sums->class_entries[i];
        for (int32_t side = 0; side < 2; side++) {
            int32_t rank = ranks - 1 + side;
            int32_t row = kbmla_div(rank, clusters);
            int32_t column = kbmla_plan_row_column(row, rows, clusters, rank - row * clusters);
            fullest = kbmla_max(fullest, kbmla_plan_load(sums, entries, clusters, column));
        }
    }
    return fullest;
}

/* The totals, by one thread. */
KBMLA_HOST_DEVICE kbmla_plan_totals kbmla_plan_total(const kbmla_plan_rule *rule,
                                                     const kbmla_plan_sums *sums) {
    kbmla_plan_totals totals = {0, sums->slots, 0, 0};
    for (int32_t i = 0; i < KBMLA_PLAN_CLASSES; i++) {
        totals.entries += sums->class_entries[i];
        totals.weight += sums->class_weight[i];
    }
    totals.fullest = kbmla_plan_fullest(sums, totals.entries, rule->num_clusters);
    return totals;
}

/* Price of a candidate in weights; INT32_MAX where it does not fit. Time is taken as that of a full
 * wave for the mean load, and beyond it as that of clusters which no longer share the memory. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_price(const kbmla_plan_rule *rule, const kbmla_plan_step *step,
                                           kbmla_plan_totals totals) {
    int32_t extra = totals.entries - rule->num_requests * rule->num_q_tiles;
    if (extra > rule->max_extra || totals.slots > rule->max_partials)
        return INT32_MAX;
    int32_t mean = totals.weight / rule->num_clusters;
    int32_t above = kbmla_max(totals.fullest - mean, 0);
    int64_t price = mean + (((int64_t)above * rule->tail_256) >> 8);
    if (totals.slots > 0) {
        /* A balanced wave ends everywhere at once, and so do its last stores. */
        int32_t storing = kbmla_min(2 * totals.slots, 2 * rule->num_clusters) - rule->num_clusters;
        int64_t fixed = rule->reduce_cost + (((int64_t)totals.slots * rule->slot_cost_256) >> 8) +
                        (int64_t)kbmla_max(storing, 0) * rule->store_cost / rule->num_clusters;
        price += fixed >> step->weight_shift;
    }
    return price < INT32_MAX ? (int32_t)price : INT32_MAX - 1;
}

/* ------------------------------------------------------------------ final order */

/* The order is one of groups: group 2 * batch holds all splits of a request but the last, group
 * 2 * batch + 1 the last one. */
typedef struct kbmla_plan_group {
    int32_t batch;
    int32_t first_split;
    int32_t num_splits; /* 0 for the first group of an unsplit request */
    int32_t per;        /* tiles of each */
} kbmla_plan_group;

KBMLA_HOST_DEVICE kbmla_plan_group kbmla_plan_group_of(int32_t index, int32_t tiles,
                                                       int32_t count) {
    int32_t per = kbmla_ceil_div(tiles, count), is_last = index & 1;
    kbmla_plan_group group = {index >> 1, 0, count - 1, per};
    if (is_last) {
        group.first_split = count - 1;
        group.num_splits = 1;
        group.per = tiles - per * (count - 1);
    }
    return group;
}

/* Sort class of a group's entries, 0 first; `longest` is that of the longest entry's tiles. The
 * stock rule keeps the order of the batch. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_sort_class(const kbmla_plan_rule *rule, kbmla_divisor longest,
                                                int32_t per) {
    if (rule->policy == KBMLA_POLICY_EQUAL)
        return 0;
    uint64_t scaled = (uint64_t)(KBMLA_PLAN_SORT_CLASSES - 1) * (uint32_t)per;
    return KBMLA_PLAN_SORT_CLASSES - 1 - (int32_t)((scaled * longest.inverse) >> 32);
}

/* Index in the list of the entry of rank `rank`. */
KBMLA_HOST_DEVICE int32_t kbmla_plan_list_index(const kbmla_plan_rule *rule, int32_t rank,
                                                int32_t entries) {
    return rule->policy == KBMLA_POLICY_EQUAL
               ? rank
               : kbmla_plan_position(rank, entries, rule->num_clusters);
}

/* ------------------------------------------------------------------ the rule of a config, host */

/* Time of one KV tile of a q tile in a full wave, in nanoseconds: the longer of memory and compute,
 * and a third of what the shorter exceeds 3/4 of it, since they do not overlap perfectly. */
static inline int32_t kbmla_plan_tile_ns(int32_t memory_ns, int32_t compute_ns) {
    int32_t longer = kbmla_max(memory_ns, compute_ns), shorter = kbmla_min(memory_ns, compute_ns);
    return longer + kbmla_max(0, shorter - longer * 3 / 4) / 3;
}

/*
 * Candidates 2 and up, chosen greedily over batches of traces, log-normals, one-long-many-short and
 * equal lengths on the model of benchmarks/simulate_plan.py; the best first, since steps of many
 * requests look at fewer. q tiles of more than 64 rows have half as many clusters and, for want of
 * workspace, about two pieces for each, so that much depends on how well pieces fill a cluster or
 * half of it. Large batches are even by the number of their requests and gain from short pieces.
 */
static const kbmla_plan_candidate kbmla_plan_wide[] = {
    {35, 0, 0, 11, 0}, {34, 0, 8, 0, 0},  {25, 0, 2, 0, 0},  {34, 0, 0, 0, 0},   {37, 0, 8, 13, 0},
    {28, 0, 0, 11, 0}, {20, 0, 0, 11, 0}, {38, 0, 8, 0, 0},  {38, 0, 4, 12, 0},  {33, 0, 8, 13, 11},
    {36, 0, 8, 13, 6}, {23, 0, 0, 0, 0},  {38, 0, 0, 0, 0},  {35, 0, 8, 13, 11}, {12, 0, 2, 0, 0},
    {17, -4, 0, 0, 0}, {44, 0, 8, 0, 11}, {14, 0, 0, 0, 0},  {32, 0, 0, 0, 0},   {21, 0, 0, 0, 0},
    {34, 0, 0, 13, 0}, {33, 0, 0, 14, 0}, {37, 0, 0, 11, 0}, {37, 0, 8, 13, 6},  {18, -4, 8, 0, 0},
    {35, 0, 0, 0, 0},  {34, 0, 8, 0, 6},  {20, 0, 2, 0, 0},  {36, 0, 0, 14, 0},  {37, 0, 0, 13, 0},
};
static const kbmla_plan_candidate kbmla_plan_narrow[] = {
    {35, 0, 0, 11, 0}, {17, -4, 4, 0, 0}, {32, 0, 8, 0, 6},  {39, 0, 0, 0, 0},  {21, 0, 8, 0, 6},
    {33, 0, 0, 0, 0},  {16, -4, 0, 0, 0}, {25, 0, 4, 12, 0}, {34, 0, 0, 11, 0}, {18, 0, 0, 13, 0},
    {36, 0, 0, 0, 0},  {12, 0, 0, 13, 0}, {17, 0, 0, 13, 0}, {34, 0, 8, 0, 6},  {33, 0, 0, 14, 0},
    {26, -4, 0, 0, 0}, {37, -4, 8, 0, 0}, {31, -4, 4, 0, 0}, {35, 0, 0, 13, 0}, {32, -4, 8, 0, 0},
    {30, 0, 8, 0, 0},  {38, 0, 8, 0, 6},  {36, 0, 8, 13, 6}, {37, 0, 8, 13, 0},
};
static const kbmla_plan_candidate kbmla_plan_large[] = {
    {22, 0, 0, 0, 0}, {12, 0, 2, 0, 0}, {15, 0, 2, 0, 0}, {11, 0, 4, 0, 0},
    {32, 0, 4, 0, 0}, {21, 0, 4, 0, 0}, {13, 0, 0, 0, 0}, {31, 0, 2, 0, 0},
    {15, 0, 0, 0, 0}, {24, 0, 0, 0, 0}, {40, 0, 4, 0, 0}, {12, 0, 0, 0, 0},
};

/* Fills the candidates of a step of `num_requests`. Their number keeps the pairs (candidate,
 * request) of a step to a few thousand: they are most of a device planner's time. */
static inline void kbmla_plan_set_candidates(kbmla_plan_rule *rule, int32_t q_tile_rows) {
    int32_t requests = rule->num_requests;
    const kbmla_plan_candidate *from = kbmla_plan_large;
    int32_t number = requests <= 256 ? 12 : requests <= 512 ? 8 : 4;
    if (requests <= 128 && q_tile_rows > 64) {
        from = kbmla_plan_wide;
        number = requests <= 64 ? 30 : 20;
    } else if (requests <= 128) {
        from = kbmla_plan_narrow;
        number = requests <= 64 ? 24 : 14;
    }
    const kbmla_plan_candidate uncut = {0, 0, 0, 0, 0};
    rule->num_candidates = 2 + number;
    for (int32_t i = 0; i < KBMLA_PLAN_MAX_CANDIDATES; i++)
        rule->candidates[i] = i >= 2 && i < 2 + number ? from[i - 2] : uncut;
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
    rule.max_extra = sizes->max_extra;
    rule.max_partials = sizes->max_partials;
    rule.min_tiles = kbmla_ceil_div(config->min_split_tokens, KBMLA_TILE_TOKENS);

    /* The same count for every request must fit the list and the workspace. */
    int32_t most = kbmla_min(1 + sizes->max_extra / all_tiles, sizes->max_partials / all_tiles);
    rule.equal_limit = kbmla_max(1, kbmla_min(most, config->num_clusters / all_tiles));
    int32_t full_tiles = config->max_requests * q_tiles;
    most = kbmla_min(1 + sizes->max_extra / full_tiles, sizes->max_partials / full_tiles);
    rule.fixed_limit = kbmla_max(1, most);

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
    rule.tail_256 = kbmla_min(256, 256 * compute_ns / tile_ns);
    int32_t store_all_ns =
        partial_ns * (KBMLA_PLAN_STORE_ALL_NS - KBMLA_PLAN_STORE_ROW_NS) / KBMLA_PLAN_STORE_ROW_NS;
    rule.store_cost = 16 * store_all_ns / tile_ns;
    rule.reduce_cost = 16 * KBMLA_PLAN_REDUCE_NS / tile_ns;
    rule.slot_cost_256 = (int32_t)((int64_t)slot_ps * 16 * 256 / 1000 / tile_ns);

    kbmla_plan_set_candidates(&rule, sizes->q_tile_rows);
    return rule;
}

#endif
