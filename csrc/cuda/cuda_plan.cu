/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device planner: the rule of plan_rule.h, with plans bit-equal to cpu_plan.c. One kernel per
 * decode step; it reads lengths only and serves every GPU backend.
 *
 *   thread = request:    tiles, their sum and maximum
 *   lane = candidate:    what it cuts by, by one warp (policy balanced only)
 *   lane = candidate:    how it cuts each request, summed up
 *   warp = candidate:    its price, lane = class; the cheapest wins
 *   thread = group:      splits ranked by length, a counting sort
 *   thread = entry:      the list
 *
 * A plan is a matter of microseconds, in which every dependent instruction and every line of code
 * that is fetched for the first time counts: loops are kept rolled, warps without work skip all but
 * the barriers, and what all of them need is computed by one. All sums are of integers, so their
 * order does not matter to the result.
 *
 * Where blocks can form a cluster (SM90 on), one plans: each block prices some of the candidates,
 * tells all blocks the prices, and lists the requests of its share. What else they need every block
 * computes by itself, since a second exchange would cost more.
 */
#include "cuda_launch.h"
#include "cuda_ptx.cuh"

#include "../plan_rule.h"

enum {
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / 32,
    MAX_BLOCKS = 8,    /* of a cluster */
    MAX_LISTED = 2048, /* splits of a block whose groups are looked up */
    COPIES = 4,        /* of a sum that lanes of one warp add to at once */
    PITCH = 17,        /* of the sums of a price class: 16 or COPIES are in use */
    UNCUT_SHIFT = 20   /* splits and, above them, uncut requests in one sum */
};

struct plan_params {
    kbmla_plan_rule rule;
    const int32_t *lengths;
    int32_t *counts;
    int32_t *work;
    int32_t list_len;
    int32_t tail;           /* index of the first partial base */
    int32_t candidate_bits; /* log2 of the number of candidates that a block prices */
    int32_t share;          /* requests that a block lists */
    int32_t listing_blocks; /* that have any */
};

struct plan_smem {
    /* Zero at first, up to `request`. */
    int32_t class_splits[KBMLA_PLAN_PRICE_CLASSES * PITCH];
    int32_t class_weight[KBMLA_PLAN_PRICE_CLASSES * PITCH];
    int32_t slots[KBMLA_PLAN_MAX_CANDIDATES];
    /* Splits of a class, 0 the longest: of all, of the shares before this block's, of a warp. */
    int32_t all_class[KBMLA_PLAN_CLASSES][COPIES];
    int32_t earlier_class[KBMLA_PLAN_CLASSES][COPIES];
    int32_t warp_class[MAX_WARPS][KBMLA_PLAN_CLASSES];
    /* Of 32 splits in a row: which of them are the first of a group, and the groups before. */
    int2 words[MAX_LISTED / 32 + 2];
    int32_t total;  /* splits */
    int32_t listed; /* splits that this block lists */
    int32_t unused[2];
    int2 request[KBMLA_MAX_REQUESTS]; /* tiles, limit of the count */
    int2 groups[KBMLA_MAX_REQUESTS];  /* that are not empty: what makes a split's rank and its
                                         batch << 8 | split when its index is added */
    kbmla_plan_step step;
    kbmla_plan_cut cuts[KBMLA_PLAN_MAX_CANDIDATES];
    int32_t price[KBMLA_PLAN_MAX_CANDIDATES];
    __align__(16) int2 ends[KBMLA_PLAN_MAX_CANDIDATES][KBMLA_PLAN_PRICE_CLASSES];
    int32_t warp_tiles[MAX_WARPS];
    int32_t warp_most[MAX_WARPS];
    int32_t warp_splits[MAX_WARPS]; /* and uncut requests << UNCUT_SHIFT */
    uint64_t priced;                /* mbarrier: the prices have come */
};

static __device__ __forceinline__ int32_t lane_sum(int32_t value) {
    return __reduce_add_sync(FULL_WARP, value);
}

/* Work and longest request of the step, from what every warp left in shared memory. */
static __device__ __forceinline__ kbmla_plan_step measure_step(const plan_smem &smem,
                                                               const kbmla_plan_rule &rule,
                                                               int32_t lane) {
    const bool is_warp = lane < (int32_t)(blockDim.x / 32);
    const int32_t tiles = is_warp ? smem.warp_tiles[lane] : 0; /* below 2^30 */
    const int32_t low = lane_sum(tiles & 0xFFFF), high = lane_sum(tiles >> 16);
    const int32_t most = __reduce_max_sync(FULL_WARP, is_warp ? smem.warp_most[lane] : 0);
    return kbmla_plan_measure((low + ((int64_t)high << 16)) * rule.num_q_tiles, most);
}

/* Columns of the sums: one per candidate of the block, or several where those are few. */
static __device__ __forceinline__ int32_t num_columns(int32_t candidate_bits) {
    return kbmla_max(1 << candidate_bits, COPIES);
}

/* Adds up how the candidate of this lane, one of `cuts`, cuts the requests. */
static __device__ __forceinline__ void sum_candidates(plan_smem &smem, const plan_params &params,
                                                      const kbmla_plan_step &step,
                                                      const kbmla_plan_cut *cuts, int32_t thread) {
    const int32_t bits = params.candidate_bits, lane = thread & 31;
    const int32_t column = lane & (num_columns(bits) - 1);
    const int32_t pairs = params.rule.num_requests << bits;
    const kbmla_plan_cut cut = cuts[lane & ((1 << bits) - 1)];
    int32_t slots = 0;
#pragma unroll 1
    for (int32_t pair = thread; pair < pairs; pair += (int32_t)blockDim.x) {
        const int32_t batch = pair >> bits;
        const int2 request = smem.request[batch];
        const int32_t units = kbmla_plan_units(&step, request.x);
        const kbmla_plan_part part = kbmla_plan_part_of(&cut, batch, units, request.y);
        const int32_t at = (kbmla_plan_class(cut.classes, part.per) >> 1) * PITCH + column;
        atomicAdd(&smem.class_splits[at], part.count);
        atomicAdd(&smem.class_weight[at],
                  kbmla_plan_weight(&params.rule, &step, units, part.count));
        slots += part.count > 1 ? part.count : 0;
    }
    atomicAdd(&smem.slots[column], slots);
}

/* The price of a candidate of the block, by a warp. A lane holds a class and the end of its ranks.
 */
static __device__ __forceinline__ int32_t price_candidate(plan_smem &smem,
                                                          const kbmla_plan_rule &rule,
                                                          const kbmla_plan_step &step,
                                                          kbmla_ratio waves, int32_t candidate_bits,
                                                          int32_t candidate, int32_t lane) {
    const int32_t clusters = rule.num_clusters;
    const int32_t candidates = 1 << candidate_bits, columns = num_columns(candidate_bits);
    int32_t splits = 0, weight = 0;
#pragma unroll
    for (int32_t copy = 0; copy < COPIES; copy++) {
        const int32_t column = candidate + copy * candidates;
        splits += column < columns ? smem.class_splits[lane * PITCH + column] : 0;
        weight += column < columns ? smem.class_weight[lane * PITCH + column] : 0;
    }
    const bool is_own = lane < columns && (lane & (candidates - 1)) == candidate;
    const int32_t average = kbmla_plan_average(weight, splits);
    /* The next shorter class that is not empty: empty ones change nothing. */
    const uint32_t used = __ballot_sync(FULL_WARP, splits > 0), below = (1u << lane) - 1;
    const int32_t lighter = __shfl_sync(FULL_WARP, average, 31 - __clz((int)(used & below)));
    const int32_t fall = splits > 0 ? average - (used & below ? lighter : 0) : 0;
    /* Splits of this class and all longer ones. */
    int32_t ranks = splits;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        int32_t longer = __shfl_down_sync(FULL_WARP, ranks, distance);
        ranks += lane + distance < 32 ? longer : 0;
    }
    kbmla_plan_totals totals;
    totals.splits = __shfl_sync(FULL_WARP, ranks, 0);
    totals.slots = lane_sum(is_own ? smem.slots[lane] : 0);
    totals.weight = lane_sum(weight);
    const int32_t rows = kbmla_plan_rows(totals.splits * rule.num_q_tiles, waves, clusters);
    const kbmla_plan_end end =
        kbmla_plan_end_of(ranks * rule.num_q_tiles, fall, rows, clusters, waves);
    /* Ends of the classes that are not empty, then those that add nothing. */
    const int32_t at = __popc((splits > 0 ? used : ~used) & below);
    smem.ends[candidate][splits > 0 ? at : __popc(used) + at] = make_int2(end.at, end.step);
    const int32_t everywhere = lane_sum(end.all);
    const int32_t at_first = lane_sum(end.at == 0 ? end.step : 0);
    __syncwarp();
    int32_t load = everywhere;
#pragma unroll 1
    for (int32_t i = 0; i < __popc(used); i += 8) {
        const int4 *ends = reinterpret_cast<const int4 *>(&smem.ends[candidate][i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int4 two = ends[j];
            load += two.x <= end.at ? two.y : 0;
            load += two.z <= end.at ? two.w : 0;
        }
    }
    totals.fullest = kbmla_max(everywhere + at_first,
                               __reduce_max_sync(FULL_WARP, end.at < clusters ? load : 0));
    return kbmla_plan_price(&rule, &step, totals);
}

/* Only where lengths are counted in units of several tiles; out of the way of the rest. */
static __device__ __noinline__ int32_t normalise_count(int32_t tiles, int32_t count) {
    return kbmla_normalise_count(tiles, count);
}

/* Adds the binary digits from `begin` to `end` of the numbers of these lanes and of those. */
template <int begin, int end>
static __device__ __forceinline__ void add_digits(int32_t number, uint32_t these, uint32_t those,
                                                  int32_t &sum_these, int32_t &sum_those) {
#pragma unroll
    for (int bit = begin; bit < end; bit++) {
        const uint32_t digit = __ballot_sync(FULL_WARP, number >> bit & 1);
        sum_these += __popc(digit & these) << bit;
        sum_those += __popc(digit & those) << bit;
    }
}

/* Notes a group whose first split, of rank `rank`, is the one of index `start` in the step. */
static __device__ __forceinline__ void note_group(plan_smem &smem, int32_t index, int32_t number,
                                                  int32_t start, int32_t rank, int32_t first) {
    smem.groups[index] = make_int2(rank - start, first - start);
    atomicOr(&smem.words[start >> 5].x, (int32_t)(1u << (start & 31)));
#pragma unroll 1
    for (int32_t word = (start >> 5) + 1; word <= (start + number) >> 5; word++)
        smem.words[word].y = index + 1;
}

/* Rank and batch << 8 | split of a split of the block. Its group is the last that starts at or
 * before it. */
static __device__ __forceinline__ int2 find_split(const plan_smem &smem, int32_t index) {
    const int2 word = smem.words[index >> 5];
    const int32_t started = __popc((uint32_t)word.x & ((2u << (index & 31)) - 1));
    const int2 group = smem.groups[word.y + started - 1];
    return make_int2(group.x + index, group.y + index);
}

/* Sums of the copies of a number of neighbouring classes. */
template <int classes>
static __device__ __forceinline__ void sum_copies(const int32_t (*copies)[COPIES],
                                                  int32_t (&sums)[classes]) {
#pragma unroll
    for (int i = 0; i < classes; i++) {
        const int4 four = *reinterpret_cast<const int4 *>(copies[i]);
        sums[i] = four.x + four.y + four.z + four.w;
    }
}

template <bool is_balanced>
static __global__ void __launch_bounds__(MAX_THREADS)
    cuda_plan_kernel(const __grid_constant__ plan_params params) {
    __shared__ __align__(16) plan_smem smem;
    const kbmla_plan_rule &rule = params.rule;
    const int32_t batch = from_here((int32_t)threadIdx.x), lane = batch & 31;
    const int32_t warp = uniform(batch >> 5);
    const int32_t threads = (int32_t)blockDim.x;
    const int32_t block = from_here((int32_t)blockIdx.x), blocks = (int32_t)gridDim.x;
    const int32_t num_requests = rule.num_requests, q_tiles = rule.num_q_tiles;
    const bool is_request = batch < num_requests;
    const kbmla_plan_candidate way = rule.candidates[lane & (KBMLA_PLAN_MAX_CANDIDATES - 1)];
    const uint32_t priced = smem_address(&smem.priced);
    kbmla_ratio waves = kbmla_make_ratio(1, rule.num_clusters);
    kbmla_ratio per_tile = kbmla_make_ratio(1, q_tiles);
    waves.value = from_here(waves.value);
    per_tile.value = from_here(per_tile.value);

    for (int32_t i = batch; i < (int32_t)(offsetof(plan_smem, request) / 16); i += threads)
        reinterpret_cast<int4 *>(&smem)[i] = make_int4(0, 0, 0, 0);
    if (is_balanced && blocks > 1) {
        if (batch == 0)
            mbarrier_init(priced, 1);
        cluster_sync(); /* a block may be stored to once it runs */
        if (batch == 0)
            mbarrier_arrive_expect(priced, (uint32_t)(rule.num_candidates * sizeof(int32_t)));
    }
    /* The lengths' address is translated while the kernel before still runs. */
    if (is_request && lane == 0)
        prefetch_l2(params.lengths + batch);
    grid_dependency_launch();
    grid_dependency_wait();

    const int32_t length = is_request ? params.lengths[batch] : 0;
    const int32_t tiles = kbmla_max(length, 0) == 0 ? 0 : ((length - 1) >> 7) + 1;
    smem.request[batch] = make_int2(tiles, kbmla_plan_limit(&rule, tiles));
    const int32_t sum = lane_sum(tiles), longest = __reduce_max_sync(FULL_WARP, tiles);
    if (lane == 0) {
        smem.warp_tiles[warp] = sum;
        smem.warp_most[warp] = longest;
    }
    __syncthreads();

    if (warp == 0) {
        const kbmla_plan_step step = measure_step(smem, rule, lane);
        if (lane == 0)
            smem.step = step;
        if (is_balanced && lane < KBMLA_PLAN_MAX_CANDIDATES)
            smem.cuts[lane] = kbmla_plan_make_cut(&rule, &step, lane, way);
    }
    __syncthreads();

    const kbmla_plan_step step = smem.step;
    /* From the prices on a thread has a group: one or two per request. Two only where one block
     * lists. */
    const int32_t per_request = kbmla_plan_groups_per_request(&rule);
    const int32_t groups = num_requests * per_request, owner = batch >> (per_request - 1);
    const bool is_group = batch < groups, is_one_warp = groups <= 32;
    int32_t best = 0;
    const int2 request = smem.request[owner];
    const int32_t units = kbmla_plan_units(&step, request.x);
    if (is_balanced) {
        const int32_t bits = params.candidate_bits, first = block << bits;
        const bool is_pricing = first < rule.num_candidates;
        if (is_pricing && (warp * 32) >> bits < num_requests)
            sum_candidates(smem, params, step, &smem.cuts[first], batch);
        __syncthreads();
        if (is_pricing && warp < 1 << bits) {
            const int32_t price = price_candidate(smem, rule, step, waves, bits, warp, lane);
            int32_t *place = &smem.price[first + warp];
            if (blocks == 1)
                *place = price;
            else if (lane < blocks)
                cluster_store(smem_address(place), price, priced, (uint32_t)lane);
        }
        if (blocks == 1)
            __syncthreads();
        else
            mbarrier_wait(priced, 0);
        const int32_t price = lane < rule.num_candidates ? smem.price[lane] : INT32_MAX;
        const int32_t least = __reduce_min_sync(FULL_WARP, price);
        best = __ffs(__ballot_sync(FULL_WARP, price == least)) - 1; /* candidate 0 always fits */
    }

    const int32_t begin = block * params.share, end = kbmla_min(begin + params.share, groups);
    if (block > 0 && begin >= end)
        return;
    const bool is_listing = warp * 32 >= begin && warp * 32 < end;
    int32_t count = 0, class_of = 0, before = 0, rank = 0, uncut_before = 0;
    uint32_t used = 0; /* lanes whose group is not empty */
    kbmla_plan_group group = {0, 0, 0};
    if (warp * 32 < groups) {
        if (is_group) {
            int32_t per;
            kbmla_ratio classes;
            if (is_balanced) {
                const kbmla_plan_cut cut = smem.cuts[best];
                per = kbmla_plan_part_of(&cut, owner, units, request.y).per;
                count = kbmla_plan_whole_count(units, per);
                classes = cut.classes;
            } else {
                count = kbmla_plan_policy_count(&rule, &step, request.x);
                per = kbmla_plan_per(units, count);
                classes = kbmla_plan_list_classes(&rule, &step);
            }
            if (step.shift > 0) {
                count = normalise_count(request.x, count);
                per = kbmla_plan_per(units, count);
            }
            group = kbmla_plan_group_of(batch & (per_request - 1), per_request, units, count, per);
            class_of = KBMLA_PLAN_CLASSES - 1 - kbmla_plan_class(classes, group.length);
        }
        const int32_t number = group.num_splits;
        const bool is_uncut = number == 1 && count == 1;
        if (!is_one_warp) {
            if (number > 0) {
                atomicAdd(&smem.all_class[class_of][lane % COPIES], number);
                if (batch < begin)
                    atomicAdd(&smem.earlier_class[class_of][lane % COPIES], number);
            }
            const int32_t sum = lane_sum(number + (is_uncut ? 1 << UNCUT_SHIFT : 0));
            if (lane == 0)
                smem.warp_splits[warp] = sum;
        }
        if (is_listing) {
            /* Of the groups before this one in the warp: the splits of its class and of all.
             * Splits are added by their binary digits. A warp alone ranks its groups by that. */
            used = __ballot_sync(FULL_WARP, number > 0);
            uint32_t same = used, longer = 0;
#pragma unroll
            for (int bit = 5; bit >= 0; bit--) {
                const bool is_set = class_of >> bit & 1;
                const uint32_t set = __ballot_sync(FULL_WARP, is_set);
                longer |= is_set ? same & ~set : 0;
                same &= is_set ? set : ~set;
            }
            const uint32_t below = (1u << lane) - 1;
            const uint32_t earlier = (same & below) | (is_one_warp ? longer : 0);
            uncut_before = __popc(__ballot_sync(FULL_WARP, is_uncut) & below);
            const int32_t most = __reduce_max_sync(FULL_WARP, number);
            add_digits<0, 1>(number, earlier, below, rank, before);
            if (most > 1)
                add_digits<1, 3>(number, earlier, below, rank, before);
            if (most > 7)
                add_digits<3, 9>(number, earlier, below, rank, before);
            /* The last of a class knows its sum. */
            if (number > 0 && same >> lane == 1)
                smem.warp_class[warp][class_of] = rank + number;
        }
    }
    if (!is_one_warp)
        __syncthreads();

    if (is_listing) {
        int32_t total = __shfl_sync(FULL_WARP, before + group.num_splits, 31), listed = total;
        int32_t start = before; /* among the splits of this block */
        if (!is_one_warp) {
            const int32_t splits_mask = (1 << UNCUT_SHIFT) - 1;
            const int32_t of_warp = lane * 32 < groups ? smem.warp_splits[lane] : 0;
            const bool is_share = lane * 32 >= begin && lane * 32 < end;
            const int32_t of_share = is_share ? of_warp & splits_mask : 0;
            /* First ranks of the classes: a lane holds two. */
            int32_t two[2], earlier[1];
            sum_copies(&smem.all_class[2 * lane], two);
            sum_copies(&smem.earlier_class[class_of], earlier);
            const int32_t of_lower = lane_sum(lane < warp ? of_warp : 0);
            start += lane_sum(lane < warp ? of_share : 0);
            listed = lane_sum(of_share);
            before += of_lower & splits_mask;
            uncut_before += of_lower >> UNCUT_SHIFT;
            int32_t sum = two[0] + two[1];
#pragma unroll
            for (int distance = 1; distance < 32; distance <<= 1) {
                const int32_t longer = __shfl_up_sync(FULL_WARP, sum, distance);
                sum += lane >= distance ? longer : 0;
            }
            total = __shfl_sync(FULL_WARP, sum, 31);
            sum -= two[0] + two[1];
            const int32_t even = __shfl_sync(FULL_WARP, sum, class_of >> 1);
            const int32_t odd = __shfl_sync(FULL_WARP, sum + two[0], class_of >> 1);
            rank += (class_of & 1 ? odd : even) + earlier[0];
#pragma unroll 4
            for (int32_t other = begin / 32; other < warp; other++)
                rank += smem.warp_class[other][class_of];
        }
        if (batch == begin) {
            smem.total = total;
            smem.listed = listed;
        }
        const int32_t index = warp * 32 - begin + __popc(used & ((1u << lane) - 1));
        if (group.num_splits > 0 && listed <= MAX_LISTED)
            note_group(smem, index, group.num_splits, start, rank, owner << 8 | group.first_split);
    }
    __syncthreads();

    const int32_t entries = smem.total * q_tiles, listed = smem.listed;
    const int32_t rows = kbmla_plan_rows(entries, waves, rule.num_clusters);
    /* Group by group only with the capacities of tests and many fixed counts. */
    const bool is_found = listed <= MAX_LISTED;
    const int32_t stride = is_found ? threads : 1;
    const int32_t stop = (is_found ? listed : is_listing ? group.num_splits : 0) * q_tiles;
#pragma unroll 1
    for (int32_t i = is_found ? batch : 0; i < stop; i += stride) {
        const int32_t at = kbmla_scale(i, per_tile), q_tile = i - at * q_tiles;
        int2 split = make_int2(rank + at, (owner << 8 | group.first_split) + at);
        if (is_found)
            split = find_split(smem, at);
        params.work[kbmla_plan_list_index(&rule, split.x * q_tiles + q_tile, rows, waves)] =
            kbmla_pack_entry(q_tile, split.y >> 8, split.y & 255, num_requests);
    }
    if (is_listing && is_group && (batch & (per_request - 1)) == 0) {
        params.counts[owner] = count;
        params.work[params.tail + owner] = count > 1 ? ~((before - uncut_before) * q_tiles) : -1;
    }
    /* What is no entry and no partial base of a request. */
#pragma unroll 1
    for (int32_t i = entries + block * threads + batch; i < params.list_len - num_requests;
         i += params.listing_blocks * threads)
        params.work[i < params.tail ? i : i + num_requests] = -1;
}

kbmla_status kbmla_cuda_plan_cluster_fits(int32_t *fits, kbmla_error *err) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {MAX_BLOCKS, 1, 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(MAX_BLOCKS);
    launch.blockDim = dim3(MAX_THREADS);
    launch.attrs = &cluster;
    launch.numAttrs = 1;
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(
                   &clusters, reinterpret_cast<const void *>(cuda_plan_kernel<true>), &launch),
               err);
    *fits = clusters > 0;
    return KBMLA_OK;
}

extern "C" kbmla_status kbmla_cuda_plan(const kbmla_config *config, const kbmla_sizes *sizes,
                                        const kbmla_plan_args *args, struct CUstream_st *stream,
                                        kbmla_error *err) {
    kbmla_cuda_device device;
    FORWARD_IF_ERROR(kbmla_cuda_current_device(&device, err));
    plan_params params;
    params.rule = kbmla_make_plan_rule(config, sizes, args->num_requests);
    params.lengths = args->lengths;
    params.counts = args->counts;
    params.work = args->work;
    params.list_len = sizes->list_len;
    params.tail = sizes->list_len - config->max_requests;
    const bool is_balanced = params.rule.policy == KBMLA_POLICY_BALANCED;
    const int32_t blocks =
        is_balanced && device.plans_in_cluster && args->num_requests > 0 ? MAX_BLOCKS : 1;
    params.candidate_bits = 0;
    while (blocks << params.candidate_bits < params.rule.num_candidates)
        params.candidate_bits++;
    /* Whole warps of requests, and all groups where there is one block. */
    params.share =
        blocks > 1 ? kbmla_ceil_div(args->num_requests, 32 * blocks) * 32 : 2 * KBMLA_MAX_REQUESTS;
    params.listing_blocks = blocks > 1 ? kbmla_ceil_div(args->num_requests, params.share) : 1;
    const int32_t threads = args->num_requests > 512                  ? MAX_THREADS
                            : args->num_requests > 256 || blocks == 1 ? 512
                                                                      : 256;
    void *arguments[] = {&params};
    const void *kernel = is_balanced ? reinterpret_cast<const void *>(cuda_plan_kernel<true>)
                                     : reinterpret_cast<const void *>(cuda_plan_kernel<false>);
    return kbmla_cuda_launch(kernel, blocks, blocks, threads, 0, device.has_pdl != 0, arguments,
                             stream, err);
}
