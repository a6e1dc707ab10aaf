/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The producer warps of the SM90 decode: KV tiles into the ring, Q and the items' facts into their
 * buffers. Each walks the work list on its own and runs ahead into the next item; only room stops
 * it.
 *
 * A tile is always two stages, one for each consumer warpgroup to score; a stage past the end of an
 * item holds whatever was there before.
 */
#ifndef KBMLA_SM90_PRODUCER_CUH
#define KBMLA_SM90_PRODUCER_CUH

#include "../cuda/cuda_item.cuh"
#include "sm90_items.cuh"
#include "sm90_tensor_map.h"
#include "sm90_tile.cuh"

enum {
    TMA_WARP = 0,
    ROW_WARPS = 2, /* warps 0 and 1, where pages are copied row by row */
    ROW_LAG = 2,   /* stages on their way before the oldest is announced */
    QUERY_WARP = 3
};

/* Every byte of `tokens` rows from `row` on to NaN, by a warp. */
static __device__ __forceinline__ void fill_rows(uint32_t stage, uint32_t row, uint32_t tokens,
                                                 uint32_t lane) {
    for (uint32_t r = row; r < row + tokens; r++) {
        store_shared_16(stage + (lane >> 3) * PANEL_BYTES + r * 128 + (lane & 7) * 16, NAN_BYTES);
        if (lane < 4)
            store_shared_16(stage + LATENT_BYTES + r * 64 + lane * 16, NAN_BYTES);
    }
}

/* Pages of 16 tokens and more by tensor copies: a lane holds the page of a box, of 32 ahead. Pages
 * that do not exist read as NaN. */
template <int N>
static __device__ __forceinline__ void produce_pages(const decode_params &params,
                                                     const sm90_map &pages, sm90_smem<N> &smem) {
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t box_tokens = pages.box_rows, boxes = STAGE_TOKENS / box_tokens;
    const uint32_t page_mask = (uint32_t)params.args.page_size - 1;
    const uint32_t num_pages =
        (uint32_t)from_here((int32_t)min(params.args.num_pages, (int64_t)INT32_MAX));
    const uint32_t ring = smem_address(smem.ring), full = smem_address(smem.full_bar),
                   empty = smem_address(smem.empty_bar);
    /* Blocks that share a line read it at about the same time; then no one needs it before the next
     * step, unlike plan, tables and partial results. */
    const uint64_t policy = l2_evict_first();
    ring_place<N> place = {0};
    item_reader reader = start_items(params);
#pragma unroll 1
    for (;;) {
        work_item item;
        find_item(params, reader, item);
        const int32_t *table =
            params.args.block_table + item.batch * params.args.block_table_stride;
        const uint32_t stages = (item.end - item.begin + KBMLA_TILE_TOKENS - 1) /
                                KBMLA_TILE_TOKENS * (KBMLA_TILE_TOKENS / STAGE_TOKENS);
        uint32_t token = item.begin + lane * box_tokens; /* of this lane's box */
        const int32_t *const own_page = table + (token >> params.page_shift);
        if (reader.is_guess)
            grid_dependency_wait_with((int64_t)own_page, item.end);
        int32_t page = token < item.end ? *own_page : 0;
        if (reader.is_guess && !settle_guess(reader))
            continue;
        if (!reader.tile.is_valid)
            return;
        int32_t next_page = 0;
        for (uint32_t stage = 0; stage < stages; stage++) {
            const uint32_t first = stage * boxes % 32; /* lane of the stage's first box */
            if (first == 0 && stage > 0) {
                token += 32 * box_tokens;
                page = next_page;
            }
            const bool is_mine = lane - first < boxes && token < item.end;
            const bool is_bad = is_mine && (uint32_t)page >= num_pages;
            const uint32_t good = __ballot_sync(FULL_WARP, is_mine && !is_bad);
            uint32_t bad = __ballot_sync(FULL_WARP, is_bad);
            const uint32_t to = ring + place.stage() * STAGE_BYTES;
            mbarrier_wait(empty + 8 * place.stage(), place.phase() ^ 1);
            if (bad != 0) {
                for (; bad != 0; bad &= bad - 1)
                    fill_rows(to, (__ffs((int)bad) - 1 - first) * box_tokens, box_tokens, lane);
                fence_async_proxy();
                __syncwarp();
            }
            const uint32_t barrier = full + 8 * place.stage();
            if (good >> lane & 1) {
                const uint32_t row = (lane - first) * box_tokens;
                const int32_t page_row = (int32_t)(token & page_mask);
                if (boxes == 1)
                    tma_load_4d(to, &pages.latent, 0, page_row, 0, page, barrier, policy);
                else
#pragma unroll 1
                    for (int panel = 0; panel < 4; panel++)
                        tma_load_4d(to + panel * PANEL_BYTES + row * 128, &pages.latent, 0,
                                    page_row, panel, page, barrier, policy);
                tma_load_3d(to + LATENT_BYTES + row * 64, &pages.rope, 0, page_row, page, barrier,
                            policy);
            }
            /* The phase cannot end before this, however early a copy does. */
            if (lane == 0)
                mbarrier_arrive_expect(barrier, __popc(good) * box_tokens * KBMLA_HEAD_DIM_QK);
            if (first == 0) {
                const uint32_t next = token + 32 * box_tokens;
                next_page = next < item.end ? table[next >> params.page_shift] : 0;
            }
            place = place.next();
        }
        kbmla_work_walk_advance(&reader.walk, 1);
    }
}

/* Waits for the last `count` stages before `place` and announces them. */
template <int N>
static __device__ __forceinline__ void announce_rows(sm90_smem<N> &smem, ring_place<N> place,
                                                     uint32_t count, uint32_t lane) {
    constexpr uint32_t STAGES = sm90_smem<N>::STAGES;
    cp_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    for (; count > 0; count--)
        if (lane == 0)
            mbarrier_arrive(
                smem_address(&smem.full_bar[(place.stage() + STAGES - count) % STAGES]));
}

/* Any page size and stride, row by row: warp w copies rows 32w .. 32w + 31 of a stage, lane l knows
 * where row l of these is, 0 past the end. */
template <int N>
static __device__ __forceinline__ void produce_rows(const decode_params &params, sm90_smem<N> &smem,
                                                    uint32_t producer_warp) {
    constexpr int STAGES = sm90_smem<N>::STAGES;
    const kbmla_decode_args &args = params.args;
    const uint32_t lane = threadIdx.x & 31, first_row = 32 * producer_warp;
    const uint32_t ring = smem_address(smem.ring), full = smem_address(smem.full_bar),
                   empty = smem_address(smem.empty_bar);
    const uint64_t policy = l2_evict_first();
    ring_place<N> place = {0};
    uint32_t on_their_way = 0;
    item_reader reader = start_items(params);
#pragma unroll 1
    for (;;) {
        work_item item;
        find_item(params, reader, item);
        if (reader.is_guess)
            grid_dependency_wait();
        if (reader.is_guess && !settle_guess(reader))
            continue;
        if (!reader.tile.is_valid)
            break;
        const int32_t *table = args.block_table + item.batch * args.block_table_stride;
        /* To the end of a whole tile. */
#pragma unroll 1
        for (uint32_t first = item.begin; first / KBMLA_TILE_TOKENS * KBMLA_TILE_TOKENS < item.end;
             first += STAGE_TOKENS) {
            const uint32_t token = first + first_row + lane;
            const uint64_t row = token < item.end ? cache_row(params, table, token) : 0;
            const bool is_free = mbarrier_poll(empty + 8 * place.stage(), place.phase() ^ 1);
            if (!__all_sync(FULL_WARP, is_free)) {
                /* The consumers may be waiting for what is on its way. */
                announce_rows<N>(smem, place, on_their_way, lane);
                on_their_way = 0;
                mbarrier_wait(empty + 8 * place.stage(), place.phase() ^ 1);
            }
            const uint32_t to = ring + place.stage() * STAGE_BYTES;
#pragma unroll 4
            for (uint32_t r = 0; r < 32; r++) {
                const uint64_t from = __shfl_sync(FULL_WARP, row, (int)r);
                if (from > MISSING_ROW)
                    cp_async_16(to + row_chunk_offset(first_row + r, lane, PANEL_BYTES),
                                (const uint8_t *)from + 16 * lane, policy);
                else if (from == MISSING_ROW)
                    fill_rows(to, first_row + r, 1, lane);
            }
#pragma unroll
            for (uint32_t r = 0; r < 32; r += 8) {
                const uint32_t at = r + (lane >> 2), chunk = 32 + (lane & 3);
                const uint64_t from = __shfl_sync(FULL_WARP, row, (int)at);
                if (from > MISSING_ROW)
                    cp_async_16(to + row_chunk_offset(first_row + at, chunk, PANEL_BYTES),
                                (const uint8_t *)from + 16 * chunk, policy);
            }
            cp_async_commit();
            place = place.next();
            if (++on_their_way > ROW_LAG) {
                cp_async_wait<ROW_LAG>();
                fence_async_proxy();
                __syncwarp();
                if (lane == 0)
                    mbarrier_arrive(full + 8 * ((place.stage() + STAGES - ROW_LAG - 1) % STAGES));
                on_their_way = ROW_LAG;
            }
        }
        kbmla_work_walk_advance(&reader.walk, 1);
    }
    announce_rows<N>(smem, place, on_their_way, lane);
}

/* Q row by row, for strides that no map describes; rows that do not exist are zero. A lane knows
 * the address of one row. */
template <int N>
static __device__ __forceinline__ void copy_query_rows(const decode_params &params, uint32_t q,
                                                       const work_item &item, uint32_t lane) {
    constexpr uint32_t panel_bytes = sm90_smem<N>::Q_PANEL_BYTES;
#pragma unroll 1
    for (int32_t begin = 0; begin < N; begin += 32) {
        const int32_t own = begin + (int32_t)lane < item.rows ? begin + (int32_t)lane : 0;
        const uint64_t address = (uint64_t)query_row(params, item.batch, item.first_row + own);
        const int32_t rows = kbmla_min(32, N - begin);
#pragma unroll 2
        for (int32_t row = 0; row < rows; row++) {
            const uint8_t *from = (const uint8_t *)__shfl_sync(FULL_WARP, address, row) + 16 * lane;
            const uint32_t bytes = begin + row < item.rows ? 16 : 0;
            cp_async_16_or_zero(q + row_chunk_offset(begin + row, lane, panel_bytes), from, bytes);
            if (lane < 4)
                cp_async_16_or_zero(q + row_chunk_offset(begin + row, 32 + lane, panel_bytes),
                                    from + KBMLA_HEAD_DIM_V, bytes);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
}

/* Q of the next item, as soon as the last scores of the one before are done, with what consumers
 * need to know of it. Rows that do not exist see what the last one sees. */
template <int N>
static __device__ __forceinline__ void produce_query(const decode_params &params,
                                                     const sm90_map &query, sm90_smem<N> &smem) {
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t q = smem_address(smem.q), full = smem_address(&smem.query_full_bar),
                   empty = smem_address(&smem.query_empty_bar);
    /* Then rows need no divisions. */
    const bool sees_all = params.q_len == 1 && params.args.causal_lens == NULL;
    const uint64_t policy = l2_evict_normal();
    uint32_t parity = 0;
    item_reader reader = start_items(params);
#pragma unroll 1
    for (;;) {
        work_item item;
        const bool is_item = find_item(params, reader, item);
        if (reader.is_guess)
            grid_dependency_wait_with(item.batch, item.first_row);
        if (reader.is_guess && !settle_guess(reader))
            continue;
        if (reader.tile.is_valid && !is_item) {
            kbmla_work_walk_advance(&reader.walk, 1);
            continue;
        }
        mbarrier_wait(empty, parity ^ 1);
        item_info &info = smem.item[parity];
        if (lane == 0) {
            info.is_valid = is_item;
            if (is_item) {
                if (query.is_tma) {
                    tma_load_4d(q, &query.latent, 0, item.first_row, 0, item.batch, full, policy);
                    tma_load_3d(q + 4 * sm90_smem<N>::Q_PANEL_BYTES, &query.rope, 0, item.first_row,
                                item.batch, full, policy);
                }
                info.slot = item.slot;
                info.tile_row = item.tile_row;
                info.rows = item.rows;
                info.begin = item.begin;
                info.end = item.end;
            }
        }
        __syncwarp();
        if (is_item) {
            const int32_t last = item.first_row + kbmla_max(item.rows - 1, 0);
#pragma unroll 1
            for (int32_t row = (int32_t)lane; row < N; row += 32) {
                const int32_t own = kbmla_min(item.first_row + row, last);
                smem.visible[parity][row] =
                    sees_all ? item.length : visible_keys(params, item.batch, item.length, own);
                if (info.slot < 0) {
                    smem.out_at[parity][row] =
                        kbmla_out_row(&params.args, params.num_heads, item.batch, own);
                    smem.lse_at[parity][row] =
                        kbmla_lse_row(&params.args, params.num_heads, item.batch, own);
                }
            }
            if (!query.is_tma)
                copy_query_rows<N>(params, q, item, lane);
            __syncwarp();
            /* Later tokens see more. */
            if (lane == 0)
                info.clean_end = kbmla_min((int32_t)info.end, smem.visible[parity][0]);
        }
        /* Each lane for what it wrote. */
        if (lane == 0)
            mbarrier_arrive_expect(full, is_item && query.is_tma ? N * KBMLA_HEAD_DIM_QK : 0);
        else
            mbarrier_arrive(full);
        if (!is_item)
            return;
        kbmla_work_walk_advance(&reader.walk, 1);
        parity ^= 1;
    }
}

#endif
