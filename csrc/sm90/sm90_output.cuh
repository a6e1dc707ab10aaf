/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of an item of the SM90 decode: from O, row sums and maxima to results, or to partials and
 * their lse where a request is split.
 */
#ifndef KBMLA_SM90_OUTPUT_CUH
#define KBMLA_SM90_OUTPUT_CUH

#include "sm90_tile.cuh"

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
            float (&lse)[sm90_smem<N>::LANE_ROWS], float numerator, bool has_stages,
            uint32_t lane) {
    constexpr int LANE_ROWS = sm90_smem<N>::LANE_ROWS;
    uint32_t row[LANE_ROWS];
    float sum[LANE_ROWS];
    bool is_empty[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        row[i] = min(32 * i + lane, (uint32_t)N - 1);
        sum[i] = 0.0f;
        if (has_stages)
#pragma unroll
            for (int part = 0; part < sm90_smem<N>::ROW_PARTS; part++)
                sum[i] += smem.row_sum[part][row[i]];
        lse[i] = smem.row_max[0][row[i]];
        is_empty[i] = sum[i] == 0.0f;
        sum[i] = is_empty[i] ? 1.0f : sum[i];
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        lse[i] = log2f(sum[i]) - params.log2_p_scale + lse[i] * params.softmax_scale_log2;
        lse[i] = from_here(is_empty[i] ? -INFINITY : lse[i]);
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
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

#endif
