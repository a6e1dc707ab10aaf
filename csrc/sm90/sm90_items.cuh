/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the producer warps of the SM90 decode find their items.
 *
 * From an entry of the work list to its item is a chain of loads and quotients. The first one is
 * gone through before the wait for the kernel before, with whatever is in memory then: a guess,
 * from which nothing is taken but addresses that hold for any values. Behind the wait all of it is
 * read again, at once, and the item is taken only if nothing differs. A plan serves many layers, so
 * it seldom does.
 */
#ifndef KBMLA_SM90_ITEMS_CUH
#define KBMLA_SM90_ITEMS_CUH

#include "../cuda/cuda_item.cuh"
#include "../cuda/cuda_ptx.cuh"

/* A warp's place in the work list, with what it has read there. */
struct item_reader {
    kbmla_work_walk walk;
    kbmla_tile tile; /* of the entry; not valid: the walk has ended */
    int32_t entry;
    request_facts facts; /* of the tile's request */
    const int32_t *entry_at, *length_at, *count_at, *element_at;
    int32_t is_guess;
};

static __device__ __forceinline__ item_reader start_items(const decode_params &params) {
    item_reader reader = {start_walk(params)};
    reader.is_guess = 1;
    return reader;
}

static __device__ __forceinline__ int32_t read_entry(const item_reader &reader) {
    return kbmla_work_walk_index(&reader.walk) < reader.walk.work_len
               ? load_relaxed(reader.entry_at)
               : -1;
}

static __device__ __forceinline__ request_facts read_facts(const item_reader &reader) {
    request_facts none = {0, 0, 0};
    if (!reader.tile.is_valid)
        return none;
    return {load_relaxed(reader.length_at), load_relaxed(reader.count_at),
            load_relaxed(reader.element_at)};
}

/* The item of the walk's place; false, and one of no tokens, if there is nothing to do. */
static __device__ __forceinline__ bool find_item(const decode_params &params, item_reader &reader,
                                                 work_item &item) {
    reader.entry_at = from_here(reader.walk.work + kbmla_work_walk_index(&reader.walk));
    reader.entry = read_entry(reader);
    reader.tile = kbmla_work_walk_tile(&reader.walk, reader.entry);
    reader.length_at = from_here(params.args.lengths + reader.tile.batch);
    reader.count_at = from_here(params.args.counts + reader.tile.batch);
    reader.element_at = from_here(params.args.work + params.tail + reader.tile.batch);
    reader.facts = read_facts(reader);
    return make_item(params, reader.facts, reader.tile, item) && reader.tile.is_valid;
}

/* Behind the wait: lets the next kernel start, and says whether the guess was right. If not the
 * item has to be found again. */
static __device__ __forceinline__ bool settle_guess(item_reader &reader) {
    reader.is_guess = 0;
    const int32_t entry = read_entry(reader);
    const request_facts facts = read_facts(reader);
    grid_dependency_launch(); /* the reduce may read lengths and plan before its own wait */
    return __all_sync(FULL_WARP, (entry == reader.entry) & (facts.length == reader.facts.length) &
                                     (facts.planned == reader.facts.planned) &
                                     (facts.element == reader.facts.element));
}

#endif
