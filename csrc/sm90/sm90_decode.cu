/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode for SM90a (H100, H200): FP8 tensor cores on both products, any row count in blocks of up
 * to 64 rows.
 *
 * wgmma takes E4M3 operands from shared memory only as they lie along K, and a KV row lies along
 * the channels. So the products are
 *
 *     S = Q K^T       64 rows, of which N exist, by the 64 tokens of a stage; both in shared memory
 *     O^T = V^T P^T   columns by N rows; V^T through ldmatrix in registers, P in shared memory
 *
 * Nothing is transposed in memory, and O costs what rows there are, rounded up to 16, 24, 32, 40,
 * 48 or 64. S costs 64 always, and four lanes have all scores of a row: its maximum takes two
 * shuffles.
 *
 * Two warpgroups in opposite phases: each scores every second stage, and sums its 256 columns of O
 * over all of them. While one waits for scores and exponentials, the other's products run:
 *
 *     warpgroup 0   S, P of 2   O += 1, 2   S, P of 4   O += 3, 4   ...
 *     warpgroup 1   O += 0, 1   S, P of 3   O += 2, 3   S, P of 5   ...
 *
 *   TMA warp ----full_bar[stage]---> S of the warpgroup's stage
 *      ^                             maxima, going on from the other's: its P_BARRIER has to say
 *      |                               that it has weighed its stage before
 *      |                             P, and factors of older sums; its own P_BARRIER
 *      +-------empty_bar[stage]----- O += V^T P^T of the other's stage, then of its own
 *
 *   query warp --query_full_bar--> Q, item, visible of an item
 *      ^------query_empty_bar----- after the item's last scores
 *
 * P and factors are kept for two tiles of 128 tokens: a warpgroup that has seen the other's P of
 * stage k + 3 knows that it is done with those of stage k. Where no tensor map describes the cache,
 * or pages are small, two warps copy rows instead.
 *
 * FP8 wgmma keeps 13 bits below the largest exponent of its sum and cuts off the rest, so O is
 * summed over one stage only and then added in FP32 registers; the rescale of a grown maximum rides
 * on that addition. The largest score of a stage is exact, no guess that would be corrected.
 * Results of unsplit requests go straight to `out`.
 *
 * Registers of a consumer thread: O 2N all along; 32 scores and 32 of each panel on its way, or
 * three groups' products of V, its fragments and N/4 factors. What a lane needs of addresses is
 * kept beside them. Relies on kbmla.c's checks, as every backend.
 */
#include "../cuda/cuda_item.cuh"
#include "../cuda/cuda_launch.h"
#include "sm90_products.cuh"
#include "sm90_producer.cuh"
#include "sm90_softmax.cuh"
#include "sm90_tile.cuh"

/* ------------------------------------------------------------------ consumers */

/* Where the rows of an item go. */
struct item_rows {
    int32_t slot;
    int32_t tile_row;
    int32_t count; /* that exist */
};

static __device__ __forceinline__ void write_lse(const decode_params &params, const item_rows &rows,
                                                 const int64_t *lse_at, int32_t local, float lse) {
    if (local >= rows.count)
        return;
    if (rows.slot >= 0)
        *partial_lse(params, partial_row(params, rows.slot, rows.tile_row, local)) = lse;
    else if (params.args.lse != NULL)
        params.args.lse[lse_at[local]] = lse;
}

/*
 * What the rows of O are multiplied by, and their lse, of rows lane, lane + 32. A row that has seen
 * no key has sum 0. All rows at a time, and logarithms in all warps although one needs them: as
 * chains that run beside one another they cost no time, behind one another they do.
 */
template <int N>
static __device__ __forceinline__ void
finish_rows(const decode_params &params, sm90_smem<N> &smem, float *factor,
            float (&lse)[(N + 31) / 32], float numerator, bool has_stages, uint32_t lane) {
    constexpr int ROUNDS = (N + 31) / 32;
    uint32_t row[ROUNDS];
    float sum[ROUNDS];
    bool is_empty[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        row[i] = min(32 * i + lane, (uint32_t)N - 1);
        sum[i] = has_stages ? smem.row_sum[0][row[i]] + smem.row_sum[1][row[i]] : 0.0f;
        lse[i] = smem.row_max[1][row[i]];
        is_empty[i] = sum[i] == 0.0f;
        sum[i] = is_empty[i] ? 1.0f : sum[i];
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        lse[i] = log2f(sum[i]) - params.log2_p_scale + lse[i] * params.softmax_scale_log2;
        lse[i] = from_here(is_empty[i] ? -INFINITY : lse[i]);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const float quotient = from_here(numerator / sum[i]);
        /* Lanes past the last row write its factor again. */
        factor[row_position<N>(row[i])] = is_empty[i] ? 0.0f : quotient;
    }
}

/* By selection: O of a row that has seen no key is 0 times values that may be anything. */
static __device__ __forceinline__ float scaled(float o, float factor) {
    return factor == 0.0f ? 0.0f : o * factor;
}

/* Writes a block's O, each row times its factor. A lane has columns 2g and 2g + 1 of each 64 of its
 * rows 2t and 2t + 1 of each 8. */
template <int N>
static __device__ __forceinline__ void
store_rows(const decode_params &params, const item_rows &rows, const float (&o)[M_TILES][N / 2],
           const float *factor, const int64_t *out_at, uint32_t consumer_warp, uint32_t lane) {
    const int32_t first_row = 2 * (int32_t)(lane & 3);
    const int32_t column =
        (int32_t)(consumer_warp / 4 * V_COLUMNS + consumer_warp % 4 * 16 + 2 * (lane >> 2));
    factor += (lane & 3) * sm90_smem<N>::PITCH;
    if (rows.slot < 0) {
        __nv_bfloat16 *out = reinterpret_cast<__nv_bfloat16 *>(params.args.out) + column;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int32_t local = 8 * (i >> 1) + first_row + (i & 1), at = 4 * (i >> 1) + (i & 1);
            if (local < rows.count)
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
                    *reinterpret_cast<__nv_bfloat162 *>(out + out_at[local] + 64 * m) =
                        __floats2bfloat162_rn(scaled(o[m][at], factor[i]),
                                              scaled(o[m][at + 2], factor[i]));
        }
        return;
    }
    const int64_t first = partial_row(params, rows.slot, rows.tile_row, first_row);
    float *to = static_cast<float *>(params.args.workspace) + first * KBMLA_HEAD_DIM_V + column;
    __half *to_half =
        static_cast<__half *>(params.args.workspace) + first * KBMLA_HEAD_DIM_V + column;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const int32_t local = 8 * (i >> 1) + (i & 1), at = 4 * (i >> 1) + (i & 1);
        if (first_row + local < rows.count)
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const float x = scaled(o[m][at], factor[i]), y = scaled(o[m][at + 2], factor[i]);
                const int32_t offset = local * KBMLA_HEAD_DIM_V + 64 * m;
                if (params.partial_fp16)
                    *reinterpret_cast<__half2 *>(to_half + offset) = __floats2half2_rn(x, y);
                else
                    *reinterpret_cast<float2 *>(to + offset) = make_float2(x, y);
            }
    }
}

/* Named barriers, one of each warpgroup. */
enum {
    GROUP_BARRIER = CONSUMER_BARRIER + 1, /* its four warps */
    P_BARRIER = GROUP_BARRIER + 2         /* its P and factors of a stage are there for the other */
};

/* A consumer thread, and where in shared memory it reads and writes. The compiler is kept from
 * computing these again in every stage. */
struct consumer {
    uint32_t lane, warp, group, block_warp;
    uint32_t values; /* V of the ring's stage 0 */
    uint32_t p;      /* P of tile 0 */
    uint32_t row;    /* the warp's row g in an array of 4-byte values, in bytes */
};

template <int N> static __device__ __forceinline__ consumer make_consumer(sm90_smem<N> &smem) {
    const uint32_t lane = threadIdx.x & 31, block_warp = uniform(threadIdx.x >> 5),
                   group = block_warp >> 2, warp = block_warp & 3, row = 16 * warp + (lane >> 2);
    consumer self;
    self.lane = from_here(lane);
    self.block_warp = block_warp;
    self.warp = warp;
    self.group = group;
    self.values = from_here(smem_address(smem.ring) + group * (V_COLUMNS / 128) * PANEL_BYTES +
                            values_offset(warp, lane));
    self.p = from_here(smem_address(smem.p) + p_offset(group, warp, lane));
    self.row = from_here(4 * row);
    return self;
}

/* What consumers keep of an item in registers. */
struct item_stages {
    uint32_t parity; /* of the item */
    uint32_t begin;  /* first token */
    uint32_t end;    /* of whole tiles, so that both warpgroups pass through as many stages */
};

/* P and its factors of the warpgroup's stage at `own`, whose first token is `token`, and its part
 * of the row sums. */
template <int N>
static __device__ __forceinline__ void weigh(const decode_params &params, sm90_smem<N> &smem,
                                             const consumer &self, const item_stages &item,
                                             ring_place<N> own, uint32_t token, float (&sums)[2]) {
    const uint32_t stage = smem_address(smem.ring) + own.stage() * STAGE_BYTES;
    const float scale = params.softmax_scale_log2;
    float s[STAGE_TOKENS / 2];
    mbarrier_wait(smem_address(&smem.full_bar[own.stage()]), own.phase());
    compute_scores<N>(s, stage, smem_address(smem.q));
    if (self.lane == 0 && token + KBMLA_TILE_TOKENS >= item.end)
        mbarrier_arrive(smem_address(&smem.query_empty_bar));
    const bool is_masked =
        token + STAGE_TOKENS > (uint32_t)uniform(smem.item[item.parity].clean_end);
    if (is_masked)
        clear_values(stage, token, smem.item[item.parity].end, self.warp, self.lane);
    const bool has_rows = 16 * self.warp < N;
    float top[2], kept[2], own_kept[2];
    if (has_rows) {
        if (is_masked)
            mask_scores(s, smem_address(smem.visible[item.parity]) + self.row, token, self.lane);
        stage_maxima(top, s);
    }
    /* The other's maxima, which these go on from. */
    if (token != item.begin)
        named_barrier_sync(P_BARRIER + (self.group ^ 1), CONSUMERS);
    if (!has_rows)
        return;
    const uint32_t tile = token / KBMLA_TILE_TOKENS & 1,
                   own_max = smem_address(smem.row_max[self.group]) + self.row,
                   other_max = smem_address(smem.row_max[self.group ^ 1]) + self.row;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        kept[h] = load_shared_f32(other_max + 32 * h);
        own_kept[h] = load_shared_f32(own_max + 32 * h);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        kept[h] = token != item.begin ? kept[h] : NO_MAXIMUM;
        own_kept[h] = token >= item.begin + KBMLA_TILE_TOKENS ? own_kept[h] : NO_MAXIMUM;
        top[h] = grown_maximum(kept[h], top[h], scale, params.growth);
        kept[h] = exp2_approx((kept[h] - top[h]) * scale);
        sums[h] *= exp2_approx((own_kept[h] - top[h]) * scale);
    }
    /* All lanes have read. */
    __syncwarp();
    if ((self.lane & 3) == 0) {
        const uint32_t rescale =
            smem_address(&smem.rescale[tile][self.group][row_position<N>(from_here(self.row) / 4)]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            store_shared_f32(own_max + 32 * h, top[h]);
            store_shared_f32(rescale + 8 * h, kept[h]);
        }
    }
    exponentiate(s, sums, top, scale, params.log2_p_scale, self.p + tile * sm90_smem<N>::P_BYTES);
}

/* Adds the stage at `place`, whose first token is `token`, to O. */
template <int N>
static __device__ __forceinline__ void add_stage(float (&o)[M_TILES][N / 2], sm90_smem<N> &smem,
                                                 const consumer &self, ring_place<N> place,
                                                 uint32_t token) {
    const uint32_t tile = token / KBMLA_TILE_TOKENS & 1, group = token / STAGE_TOKENS & 1;
    const weighted_stage from = {
        self.values + place.stage() * STAGE_BYTES,
        smem_address(smem.p[tile]) + group * STAGE_TOKENS,
        smem_address(&smem.rescale[tile][group][(self.lane & 3) * sm90_smem<N>::PITCH])};
    accumulate<N>(o, from);
    __syncwarp();
    if (self.lane == 0)
        mbarrier_arrive(smem_address(&smem.empty_bar[place.stage()]));
}

template <int N>
static __device__ __forceinline__ void consume(const decode_params &params, sm90_smem<N> &smem) {
    const consumer self = make_consumer<N>(smem);
    const uint32_t lane = self.lane, block_warp = self.block_warp;
    const float scale = params.softmax_scale_log2;
    /* Of the warpgroup's next stage. Full barriers are waited for from phase 0 on, empty ones,
     * which nobody has used, from 1 on. */
    ring_place<N> own = {self.group};

    for (uint32_t parity = 0;; parity ^= 1) {
        mbarrier_wait(smem_address(&smem.query_full_bar), parity);
        const item_info &info = smem.item[parity];
        if (!uniform(info.is_valid))
            return;
        const uint32_t end = uniform(info.end);
        const item_stages item = {parity, (uint32_t)uniform(info.begin),
                                  (end + KBMLA_TILE_TOKENS - 1) / KBMLA_TILE_TOKENS *
                                      KBMLA_TILE_TOKENS};
        const bool has_stages = item.begin < item.end;
        float o[M_TILES][N / 2] = {};
        float sums[2] = {}; /* of the warp's rows g and g + 8, this lane's tokens */

        /* Warpgroup 0 comes by once more, for the last stage of the other. */
#pragma unroll 1
        for (uint32_t token = item.begin + self.group * STAGE_TOKENS;
             has_stages && token < item.end + STAGE_TOKENS; token += KBMLA_TILE_TOKENS) {
            const bool has_own = token < item.end, has_before = token != item.begin;
            if (has_own) {
                weigh<N>(params, smem, self, item, own, token, sums);
                fence_async_proxy();
                named_barrier_arrive(P_BARRIER + self.group, CONSUMERS);
            } else {
                named_barrier_sync(P_BARRIER + 1, CONSUMERS);
            }
            /* The other warpgroup's stage before, then the own one. */
#pragma unroll 1
            for (uint32_t step = has_before ? 0 : 1; step < 1 + has_own; step++) {
                const ring_place<N> place = step == 0 ? own.previous() : own;
                if (step == 0)
                    mbarrier_wait(smem_address(&smem.full_bar[place.stage()]), place.phase());
                else /* its four warps have written P */
                    named_barrier_sync(GROUP_BARRIER + self.group, WARPGROUP);
                add_stage<N>(o, smem, self, place, token - STAGE_TOKENS * (1 - step));
            }
            if (has_own)
                own = own.next().next();
        }

        const item_rows rows = {uniform(info.slot), uniform(info.tile_row), uniform(info.rows)};
        if (has_stages) {
            if (16 * self.warp < N) {
                const uint32_t first = 16 * self.warp + (from_here(lane) >> 2);
                float grown[2];
#pragma unroll
                for (int h = 0; h < 2; h++)
                    grown[h] =
                        smem.row_max[self.group][first + 8 * h] - smem.row_max[1][first + 8 * h];
                sum_of_lanes(sums);
#pragma unroll
                for (int h = 0; h < 2; h++)
                    sums[h] *= exp2_approx(grown[h] * scale);
                if ((lane & 3) == 0)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        smem.row_sum[self.group][first + 8 * h] = sums[h];
            }
            /* All sums are written; P, factors and maxima of the item are no longer read but for
             * the last maxima. */
            named_barrier_sync(CONSUMER_BARRIER, CONSUMERS);
        } else if (lane == 0) {
            mbarrier_arrive(smem_address(&smem.query_empty_bar)); /* no scores will */
        }
        float *const factor = smem.factor[block_warp];
        float lse[(N + 31) / 32];
        finish_rows<N>(params, smem, factor, lse, rows.slot < 0 ? params.output_scale : 1.0f,
                       has_stages, from_here(lane));
        __syncwarp();
        store_rows<N>(params, rows, o, factor, smem.out_at[parity], block_warp, from_here(lane));
        if (block_warp == 0)
#pragma unroll
            for (int i = 0; i < (N + 31) / 32; i++)
                write_lse(params, rows, smem.lse_at[parity], 32 * i + (int32_t)from_here(lane),
                          lse[i]);
        __syncwarp();
    }
}

/* ------------------------------------------------------------------ kernel */

template <int N>
static __global__ void __launch_bounds__(THREADS, 1)
    sm90_decode_kernel(const __grid_constant__ decode_params params,
                       const __grid_constant__ sm90_maps maps) {
    extern __shared__ __align__(SWIZZLE_ATOM) uint8_t raw_smem[];
    sm90_smem<N> &smem = *reinterpret_cast<sm90_smem<N> *>(raw_smem);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < sm90_smem<N>::STAGES; stage++) {
            mbarrier_init(smem_address(&smem.full_bar[stage]),
                          maps.pages.is_tma ? 1 : (uint32_t)ROW_WARPS);
            mbarrier_init(smem_address(&smem.empty_bar[stage]), CONSUMER_WARPS);
        }
        mbarrier_init(smem_address(&smem.query_full_bar), 32);
        mbarrier_init(smem_address(&smem.query_empty_bar), CONSUMER_WARPS);
        fence_barrier_init();
        if (maps.query.is_tma) {
            prefetch_tensor_map(&maps.query.latent);
            prefetch_tensor_map(&maps.query.rope);
        }
        if (maps.pages.is_tma) {
            prefetch_tensor_map(&maps.pages.latent);
            prefetch_tensor_map(&maps.pages.rope);
        }
    }
    __syncthreads();
    /* Each producer waits for the kernel before where it first needs it, and triggers the next.
     * Consumers read and write memory only behind what the producers leave in shared memory, and
     * the block ends with its producers. */
    if (threadIdx.x < CONSUMERS) {
        prefetch_plan(params);
        warpgroup_take_registers<CONSUMER_REGISTERS>();
        consume<N>(params, smem);
        return;
    }
    warpgroup_give_registers<PRODUCER_REGISTERS>();
    const uint32_t producer_warp = (threadIdx.x - CONSUMERS) >> 5;
    if (producer_warp == QUERY_WARP)
        produce_query<N>(params, maps.query, smem);
    else if (!maps.pages.is_tma && producer_warp < ROW_WARPS)
        produce_rows<N>(params, smem, producer_warp);
    else if (maps.pages.is_tma && producer_warp == TMA_WARP)
        produce_pages<N>(params, maps.pages, smem);
}

/* ------------------------------------------------------------------ launch */

namespace {

struct decode_shape {
    int32_t blocks_per_cluster;
    int32_t block_rows;
    int32_t smem_bytes;
    const void *kernel;
};

template <int N> void fill_shape(decode_shape &shape) {
    typedef sm90_smem<N> layout;
    static_assert(sizeof(layout) <= 227 * 1024, "more than a block may have");
    static_assert(
        offsetof(layout, q) + 3 * layout::Q_PANEL_BYTES + MAX_BLOCK_ROWS * 128 <= sizeof(layout) &&
            offsetof(layout, q) + 4 * layout::Q_PANEL_BYTES + MAX_BLOCK_ROWS * 64 <= sizeof(layout),
        "64 rows from any of Q's panels on are shared memory of the block");
    shape.smem_bytes = (int32_t)sizeof(sm90_smem<N>);
    shape.kernel = reinterpret_cast<const void *>(sm90_decode_kernel<N>);
}

decode_shape choose_shape(int32_t q_tile_rows) {
    decode_shape shape = {};
    shape.blocks_per_cluster = kbmla_ceil_div(q_tile_rows, MAX_BLOCK_ROWS);
    const int32_t rows = kbmla_ceil_div(q_tile_rows, shape.blocks_per_cluster);
    shape.block_rows = kbmla_max(kbmla_ceil_div(rows, 8) * 8, 16);
    switch (shape.block_rows) {
    case 16:
        fill_shape<16>(shape);
        break;
    case 24:
        fill_shape<24>(shape);
        break;
    case 32:
        fill_shape<32>(shape);
        break;
    case 40:
        fill_shape<40>(shape);
        break;
    case 48:
        fill_shape<48>(shape);
        break;
    default:
        shape.block_rows = MAX_BLOCK_ROWS;
        fill_shape<MAX_BLOCK_ROWS>(shape);
        break;
    }
    return shape;
}

} // namespace

extern "C" int32_t kbmla_sm90_decode_clusters(const kbmla_sizes *sizes,
                                              const kbmla_cuda_device *device) {
    return kbmla_max(1, device->num_sms / choose_shape(sizes->q_tile_rows).blocks_per_cluster);
}

extern "C" kbmla_status kbmla_sm90_decode_prepare(const kbmla_sizes *sizes,
                                                  const kbmla_cuda_device *device,
                                                  kbmla_error *err) {
    RETURN_IF(!device->is_sm90, err, KBMLA_UNSUPPORTED,
              "backend: sm90 needs a device of compute capability 9.0");
    decode_shape shape = choose_shape(sizes->q_tile_rows);
    FORWARD_IF_ERROR(kbmla_sm90_find_encoder(err));
    CUDA_CHECK(cudaFuncSetAttribute(shape.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shape.smem_bytes),
               err);
    return KBMLA_OK;
}

extern "C" kbmla_status kbmla_sm90_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                                          const kbmla_decode_args *args, struct CUstream_st *stream,
                                          kbmla_error *err) {
    decode_shape shape = choose_shape(sizes->q_tile_rows);
    decode_params params = make_decode_params(config, sizes, args);
    params.blocks_per_cluster = shape.blocks_per_cluster;
    params.block_rows = shape.block_rows;
    sm90_maps maps = {};
    kbmla_sm90_encode_pages(args, &maps.pages);
    kbmla_sm90_encode_query(args, config->num_heads, config->q_len, shape.block_rows, &maps.query);
    void *arguments[] = {&params, &maps};
    return kbmla_cuda_launch(shape.kernel, config->num_clusters * shape.blocks_per_cluster, 1,
                             THREADS, shape.smem_bytes, args->pdl != 0, arguments, stream, err);
}
