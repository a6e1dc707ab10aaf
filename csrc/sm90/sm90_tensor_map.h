/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor maps for bulk copies of cache pages and of Q, encoded on the host for every launch: pure
 * arithmetic of the driver, a microsecond, no call to the device.
 */
#ifndef KBMLA_SM90_TENSOR_MAP_H
#define KBMLA_SM90_TENSOR_MAP_H

#include "../internal.h"

#include <cuda.h>

/*
 * Rows of 576 bytes as the layouts of sm90_tile.cuh want them, in boxes of `box_rows` rows. latent
 * is 4D: 128 bytes, row, panel, outer; rope 3D: 64 bytes, row, outer. Rows past the last read as
 * zero.
 */
struct sm90_map {
    CUtensorMap latent;
    CUtensorMap rope;
    int32_t is_tma; /* 0: no map describes it; it is copied row by row */
    int32_t box_rows;
};

struct sm90_maps {
    sm90_map pages; /* outer: page; row: slot of a page */
    sm90_map query; /* outer: request; row: token * heads + head */
};

/* Finds the driver's encoder; later calls do nothing. */
kbmla_status kbmla_sm90_find_encoder(kbmla_error *err);

/* A box holds all four panels if it has 64 rows, else one. */
void kbmla_sm90_encode_pages(const kbmla_decode_args *args, sm90_map *map);

/* A box holds all four panels of a block's rows. */
void kbmla_sm90_encode_query(const kbmla_decode_args *args, int32_t num_heads, int32_t q_len,
                             int32_t block_rows, sm90_map *map);

#endif
