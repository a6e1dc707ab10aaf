/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See sm90_tensor_map.h. The encoder is looked up at run time, so that nothing links the driver.
 */
#include "sm90_tensor_map.h"

#include "../cuda/cuda_launch.h"

#include <atomic>

namespace {

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

enum { MIN_TMA_PAGE = 16 }; /* smaller pages are faster row by row */

std::atomic<encode_function> encoder;

bool encode(CUtensorMap *map, cuuint32_t rank, const uint8_t *base, const cuuint64_t *sizes,
            const cuuint64_t *strides, const cuuint32_t *box, CUtensorMapSwizzle swizzle) {
    const cuuint32_t every[4] = {1, 1, 1, 1};
    /* Of L2 promotions the one of 128 bytes is the fastest (benchmarks/NOTES.md). */
    return encoder.load(std::memory_order_relaxed)(
               map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, const_cast<uint8_t *>(base), sizes,
               strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* [outer, rows, 576] bytes with these strides; a box of `box_panels` panels of `box_rows` rows. The
 * panels are a dimension of their own, whose stride of 128 is below that of the rows. */
void encode_rows(sm90_map *map, const uint8_t *base, int64_t rows, int64_t row_stride,
                 int64_t outer, int64_t outer_stride, int32_t box_rows, int32_t box_panels) {
    /* A dimension of one element may have any stride, which the encoder would look at. */
    const cuuint64_t row = rows > 1 ? (cuuint64_t)row_stride : KBMLA_HEAD_DIM_QK;
    const cuuint64_t out = outer > 1 ? (cuuint64_t)outer_stride : row * (cuuint64_t)rows;
    const cuuint32_t tall = (cuuint32_t)box_rows;
    const cuuint64_t latent_sizes[4] = {128, (cuuint64_t)rows, 4, (cuuint64_t)outer};
    const cuuint64_t latent_strides[3] = {row, 128, out};
    const cuuint32_t latent_box[4] = {128, tall, (cuuint32_t)box_panels, 1};
    const cuuint64_t rope_sizes[3] = {64, (cuuint64_t)rows, (cuuint64_t)outer};
    const cuuint64_t rope_strides[2] = {row, out};
    const cuuint32_t rope_box[3] = {64, tall, 1};
    map->box_rows = box_rows;
    map->is_tma = encoder.load(std::memory_order_relaxed) != NULL && rows > 0 && outer > 0 &&
                  encode(&map->latent, 4, base, latent_sizes, latent_strides, latent_box,
                         CU_TENSOR_MAP_SWIZZLE_128B) &&
                  encode(&map->rope, 3, base + KBMLA_HEAD_DIM_V, rope_sizes, rope_strides, rope_box,
                         CU_TENSOR_MAP_SWIZZLE_64B);
}

} // namespace

kbmla_status kbmla_sm90_find_encoder(kbmla_error *err) {
    if (encoder.load(std::memory_order_relaxed) != NULL)
        return KBMLA_OK;
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &result),
               err);
    RETURN_IF(found == NULL || result != cudaDriverEntryPointSuccess, err, KBMLA_CUDA,
              "cuTensorMapEncodeTiled: the driver has none; it must support CUDA 12.0 or later");
    encoder.store(reinterpret_cast<encode_function>(found), std::memory_order_relaxed);
    return KBMLA_OK;
}

void kbmla_sm90_encode_pages(const kbmla_decode_args *args, sm90_map *map) {
    const int32_t box_rows = kbmla_min((int32_t)args->page_size, 64);
    *map = {};
    if (args->page_size >= MIN_TMA_PAGE)
        encode_rows(map, args->cache, args->page_size, args->cache_row_stride, args->num_pages,
                    args->cache_page_stride, box_rows, box_rows == 64 ? 4 : 1);
}

void kbmla_sm90_encode_query(const kbmla_decode_args *args, int32_t num_heads, int32_t q_len,
                             int32_t block_rows, sm90_map *map) {
    *map = {};
    /* One stride must lead from row to row. */
    const int64_t row = num_heads > 1 ? args->query_head_stride : args->query_token_stride;
    if (q_len == 1 || num_heads == 1 || args->query_token_stride == num_heads * row)
        encode_rows(map, args->query, (int64_t)num_heads * q_len, row, args->num_requests,
                    args->query_batch_stride, block_rows, 4);
}
