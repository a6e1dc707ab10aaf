/*
 * Device planner: the functions of plan_rule.h driven by one block, with plans bit-equal to
 * cpu_plan.c. One kernel per decode step; it reads lengths only and serves every GPU backend.
 *
 *   tiles of every request, their sum and maximum
 *   policy balanced: warps price the candidates, the cheapest wins
 *   counts, one thread per request; entries ranked longest first by a counting sort
 *   the list: every thread writes its request's entries, a warp those of a much split request
 *
 * All sums are of integers, so their order does not matter to the result.
 */
#include "cuda_launch.h"
#include "cuda_ptx.cuh"

#include "../plan_rule.h"

enum { THREADS = 1024, WARPS = 32, SOLO_ENTRIES = 8 };

struct plan_params {
    kbmla_plan_rule rule;
    const int32_t *lengths;
    int32_t *counts;
    int32_t *work;
    int32_t list_len;
    int32_t tail; /* index of the first partial base */
};

struct plan_smem {
    int32_t tiles[KBMLA_MAX_REQUESTS];
    kbmla_plan_sums sums[KBMLA_PLAN_MAX_CANDIDATES];
    kbmla_divisor piece[KBMLA_PLAN_MAX_CANDIDATES];
    int32_t price[KBMLA_PLAN_MAX_CANDIDATES];
    int64_t warp_work[WARPS];
    int32_t warp_max[WARPS];
    int32_t warp_slots[WARPS];
    int32_t class_rank[WARPS][KBMLA_PLAN_SORT_CLASSES]; /* entries, then first rank, per warp */
};

/* Sum of `value` over the lanes below this one. */
static __device__ __forceinline__ int32_t warp_exclusive_sum(int32_t value, int32_t lane) {
    int32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        int32_t below = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        sum += lane >= step ? below : 0;
    }
    return sum - value;
}

/* Work, longest request and weight shift of the step, the same in every thread. */
static __device__ kbmla_plan_step measure_step(plan_smem &smem, int32_t tiles, int32_t q_tiles) {
    const int32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int64_t work = (int64_t)tiles * q_tiles;
    int32_t most = __reduce_max_sync(0xFFFFFFFFu, tiles);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        work += __shfl_xor_sync(0xFFFFFFFFu, work, step);
    if (lane == 0) {
        smem.warp_work[warp] = work;
        smem.warp_max[warp] = most;
    }
    __syncthreads();
    work = smem.warp_work[lane];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        work += __shfl_xor_sync(0xFFFFFFFFu, work, step);
    kbmla_plan_step step;
    step.work = work;
    step.max_tiles = __reduce_max_sync(0xFFFFFFFFu, smem.warp_max[lane]);
    step.weight_shift = kbmla_plan_weight_shift(work);
    return step;
}

/* kbmla_plan_fullest by a warp: a lane looks at the two clusters at the end of its class. */
static __device__ int32_t fullest_cluster(const kbmla_plan_sums &sums, int32_t entries,
                                          int32_t clusters, int32_t lane) {
    const int32_t rows = kbmla_ceil_div(entries, clusters);
    const int32_t in_class = sums.class_entries[lane];
    const int32_t average = in_class > 0 ? kbmla_div(sums.class_weight[lane], in_class) : 0;
    /* Entries of this class and all heavier ones: ranks up to the end of the class. */
    const int32_t below = warp_exclusive_sum(in_class, lane);
    const int32_t ranks = entries - below;
    const int32_t end_row = kbmla_div(ranks, clusters), end_rest = ranks - end_row * clusters;
    int32_t column[2], load[2] = {0, 0}, taken[2] = {0, 0};
#pragma unroll
    for (int side = 0; side < 2; side++) {
        int32_t rank = ranks - 1 + side, row = kbmla_div(rank, clusters);
        column[side] = kbmla_plan_row_column(row, rows, clusters, rank - row * clusters);
    }
    uint32_t classes = __ballot_sync(0xFFFFFFFFu, in_class > 0);
    while (classes != 0) {
        const int32_t i = 31 - __clz(classes); /* heaviest first */
        classes &= ~(1u << i);
        const int32_t row = __shfl_sync(0xFFFFFFFFu, end_row, i);
        const int32_t rest = __shfl_sync(0xFFFFFFFFu, end_rest, i);
        const int32_t weight = __shfl_sync(0xFFFFFFFFu, average, i);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int32_t next = row + (kbmla_plan_row_column(row, rows, clusters, column[side]) < rest);
            load[side] += (next - taken[side]) * weight;
            taken[side] = next;
        }
    }
    return __reduce_max_sync(0xFFFFFFFFu, in_class > 0 ? kbmla_max(load[0], load[1]) : 0);
}

/* Adds a part of every lane. Lanes whose class is the first lane's are summed beforehand: in even
 * batches that is all of them, and their additions would queue up. */
static __device__ __forceinline__ void add_part(kbmla_plan_sums &sums, const kbmla_plan_part &part,
                                                int32_t lane) {
    const int32_t first = __shfl_sync(0xFFFFFFFFu, part.class_index, 0);
    const bool is_first = part.class_index == first;
    const int32_t entries = __reduce_add_sync(0xFFFFFFFFu, is_first ? part.entries : 0);
    const int32_t weight = __reduce_add_sync(0xFFFFFFFFu, is_first ? part.weight : 0);
    if (lane == 0 ? entries > 0 : !is_first && part.entries > 0) {
        atomicAdd(&sums.class_entries[part.class_index], lane == 0 ? entries : part.entries);
        atomicAdd(&sums.class_weight[part.class_index], lane == 0 ? weight : part.weight);
    }
}

/* The cheapest candidate; the first of equals. */
static __device__ int32_t choose_candidate(plan_smem &smem, const kbmla_plan_rule &rule,
                                           const kbmla_plan_step &step) {
    const int32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    /* Several warps share a candidate where there are fewer candidates than warps. */
    const int32_t share = WARPS / rule.num_candidates;
    const int32_t candidate = warp / share;
    if (candidate < rule.num_candidates) {
        kbmla_divisor piece = kbmla_plan_piece(&rule, &step, candidate);
        kbmla_plan_sums &sums = smem.sums[candidate];
        int32_t slots = 0;
        for (int32_t first = warp % share * 32; first < rule.num_requests; first += share * 32) {
            const int32_t b = first + lane;
            kbmla_plan_part parts[2] = {};
            if (b < rule.num_requests)
                slots += kbmla_plan_parts(&rule, &step, candidate, piece, b, smem.tiles[b], parts);
            add_part(sums, parts[0], lane);
            add_part(sums, parts[1], lane);
        }
        slots = __reduce_add_sync(0xFFFFFFFFu, slots);
        if (lane == 0) {
            atomicAdd(&sums.slots, slots);
            smem.piece[candidate] = piece;
        }
    }
    __syncthreads();
    if (warp < rule.num_candidates) {
        const kbmla_plan_sums &sums = smem.sums[warp];
        kbmla_plan_totals totals;
        totals.entries = __reduce_add_sync(0xFFFFFFFFu, sums.class_entries[lane]);
        totals.slots = sums.slots;
        totals.weight = __reduce_add_sync(0xFFFFFFFFu, sums.class_weight[lane]);
        totals.fullest = fullest_cluster(sums, totals.entries, rule.num_clusters, lane);
        if (lane == 0)
            smem.price[warp] = kbmla_plan_price(&rule, &step, totals);
    }
    __syncthreads();
    const int32_t price = lane < rule.num_candidates ? smem.price[lane] : INT32_MAX;
    const int32_t least = __reduce_min_sync(0xFFFFFFFFu, price);
    return least == INT32_MAX ? 0 : __ffs(__ballot_sync(0xFFFFFFFFu, price == least)) - 1;
}

static __device__ int32_t count_of(const kbmla_plan_rule &rule, const kbmla_plan_step &step,
                                   int32_t best, kbmla_divisor piece, int32_t batch,
                                   int32_t tiles) {
    if (rule.policy == KBMLA_POLICY_EQUAL)
        return kbmla_plan_equal_count(&rule, tiles, &step);
    if (rule.policy == KBMLA_POLICY_FIXED)
        return kbmla_plan_fixed_count(&rule, tiles);
    return kbmla_plan_count(&rule, best, piece, batch, tiles);
}

static __global__ void __launch_bounds__(THREADS)
    cuda_plan_kernel(const __grid_constant__ plan_params params) {
    __shared__ plan_smem smem;
    const kbmla_plan_rule &rule = params.rule;
    const int32_t batch = (int32_t)threadIdx.x, lane = batch & 31, warp = batch >> 5;
    const int32_t num_requests = rule.num_requests, q_tiles = rule.num_q_tiles;
    const bool is_request = batch < num_requests;

    int32_t *sums = reinterpret_cast<int32_t *>(smem.sums);
    for (int32_t i = batch; i < (int32_t)(sizeof smem.sums / 4); i += THREADS)
        sums[i] = 0;
    for (int32_t i = batch; i < WARPS * KBMLA_PLAN_SORT_CLASSES; i += THREADS)
        smem.class_rank[0][i] = 0;
    grid_dependency_launch();
    grid_dependency_wait();

    const int32_t tiles = is_request ? kbmla_num_tiles(params.lengths[batch]) : 0;
    smem.tiles[batch] = tiles;
    const kbmla_plan_step step = measure_step(smem, tiles, q_tiles);
    const int32_t best =
        rule.policy == KBMLA_POLICY_BALANCED ? choose_candidate(smem, rule, step) : 0;
    const int32_t count =
        is_request ? count_of(rule, step, best, smem.piece[best], batch, tiles) : 0;
    const int32_t slots = count > 1 ? count * q_tiles : 0;

    /* The longest entry scales the sort classes. */
    const kbmla_plan_group group[2] = {
        kbmla_plan_group_of(2 * batch, tiles, kbmla_max(count, 1)),
        kbmla_plan_group_of(2 * batch + 1, tiles, kbmla_max(count, 1))};
    const int32_t longest_here = __reduce_max_sync(0xFFFFFFFFu, group[0].per);
    const int32_t slots_below = warp_exclusive_sum(slots, lane);
    if (lane == 31)
        smem.warp_slots[warp] = slots_below + slots;
    if (lane == 0)
        smem.warp_max[warp] = longest_here;
    __syncthreads();
    const kbmla_divisor longest = kbmla_make_divisor(
        (uint32_t)kbmla_max(1, __reduce_max_sync(0xFFFFFFFFu, smem.warp_max[lane])));
    const int32_t first_slot =
        slots_below + __reduce_add_sync(0xFFFFFFFFu, lane < warp ? smem.warp_slots[lane] : 0);

    /* Ranks: entries of lighter sort classes come later; within one, in the order of the groups. */
    int32_t class_of[2], entries_of[2], rank[2] = {0, 0};
#pragma unroll
    for (int g = 0; g < 2; g++) {
        class_of[g] = kbmla_plan_sort_class(&rule, longest, group[g].per);
        entries_of[g] = is_request ? group[g].num_splits * q_tiles : 0;
        if (entries_of[g] > 0)
            atomicAdd(&smem.class_rank[warp][class_of[g]], entries_of[g]);
    }
    rank[1] = class_of[1] == class_of[0] ? entries_of[0] : 0;
    const uint32_t packed = (uint32_t)(class_of[0] | class_of[1] << 6 | entries_of[0] << 12);
    if (warp * 32 < num_requests) {
        for (int32_t other = 0; other < 31; other++) {
            const uint32_t seen = __shfl_sync(0xFFFFFFFFu, packed, other);
            const int32_t first = (int32_t)(seen & 63), last = (int32_t)(seen >> 6 & 63);
            const int32_t entries = (int32_t)(seen >> 12);
            if (other < lane) {
#pragma unroll
                for (int g = 0; g < 2; g++)
                    rank[g] +=
                        (first == class_of[g] ? entries : 0) + (last == class_of[g] ? q_tiles : 0);
            }
        }
    }
    __syncthreads();
    if (warp < KBMLA_PLAN_SORT_CLASSES / 32) {
        const int32_t used_warps = kbmla_ceil_div(num_requests, 32);
        int32_t total = 0;
        for (int32_t w = 0; w < used_warps; w++) {
            int32_t here = smem.class_rank[w][batch];
            smem.class_rank[w][batch] = total;
            total += here;
        }
        int32_t before = warp_exclusive_sum(total, lane);
        /* The second half of the classes starts after the first: through warp_max. */
        if (lane == 31)
            smem.warp_max[warp] = before + total;
        smem.tiles[batch] = before;
    }
    __syncthreads();
    const int32_t first_half = smem.warp_max[0];
    const int32_t entries = first_half + smem.warp_max[1];
#pragma unroll
    for (int g = 0; g < 2; g++)
        rank[g] += smem.class_rank[warp][class_of[g]] + smem.tiles[class_of[g]] +
                   (class_of[g] >= 32 ? first_half : 0);

    /* The list: valid entries, then negatives, then the bases. */
    int32_t *work = params.work;
    for (int32_t i = entries + batch; i < params.tail; i += THREADS)
        work[i] = -1;
    for (int32_t i = batch; i < params.list_len - params.tail; i += THREADS)
        work[params.tail + i] = i == batch && slots > 0 ? ~first_slot : -1;
    if (is_request)
        params.counts[batch] = count;
#pragma unroll
    for (int g = 0; g < 2; g++) {
        const bool is_solo = entries_of[g] <= SOLO_ENTRIES;
        if (is_solo)
            for (int32_t i = 0; i < entries_of[g]; i++)
                work[kbmla_plan_list_index(&rule, rank[g] + i, entries)] = kbmla_pack_entry(
                    i % q_tiles, batch, group[g].first_split + i / q_tiles, num_requests);
        uint32_t large = __ballot_sync(0xFFFFFFFFu, !is_solo);
        while (large != 0) {
            const int32_t from = __ffs(large) - 1;
            large &= large - 1;
            const int32_t number = __shfl_sync(0xFFFFFFFFu, entries_of[g], from);
            const int32_t first = __shfl_sync(0xFFFFFFFFu, rank[g], from);
            const int32_t split = __shfl_sync(0xFFFFFFFFu, group[g].first_split, from);
            for (int32_t i = lane; i < number; i += 32)
                work[kbmla_plan_list_index(&rule, first + i, entries)] = kbmla_pack_entry(
                    i % q_tiles, warp * 32 + from, split + i / q_tiles, num_requests);
        }
    }
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
    void *arguments[] = {&params};
    return kbmla_cuda_launch(reinterpret_cast<const void *>(cuda_plan_kernel), 1, THREADS, 0,
                             device.has_pdl != 0, arguments, stream, err);
}
