/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA launchers share: facts of a device, error handling, and a launch with programmatic
 * dependent launch. Everything here returns a status; nothing allocates or synchronises.
 */
#ifndef KBMLA_CUDA_LAUNCH_H
#define KBMLA_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "../internal.h"

#define CUDA_CHECK(call, err)                                                                      \
    do {                                                                                           \
        cudaError_t cuda_check_code = (call);                                                      \
        if (cuda_check_code != cudaSuccess)                                                        \
            return kbmla_cuda_fail((err), cuda_check_code, #call);                                 \
    } while (0)

/* Whether the current device, of SM90 or later, can run the planner's cluster of blocks. A part of
 * a device, as a share of its SMs under MPS, may not. */
kbmla_status kbmla_cuda_plan_cluster_fits(int32_t *fits, kbmla_error *err);

/* Fills err with the failed call and clears the runtime's last error. */
kbmla_status kbmla_cuda_fail(kbmla_error *err, cudaError_t code, const char *call);

/* Launches a kernel of `blocks` blocks, `cluster_blocks` to a cluster of CUDA (the clusters of a
 * plan are none: their blocks only stand beside one another). With `pdl` it may start while its
 * predecessor in the stream still runs, and must wait by itself before it relies on what the
 * predecessor writes (grid_dependency_wait). */
kbmla_status kbmla_cuda_launch(const void *kernel, int32_t blocks, int32_t cluster_blocks,
                               int32_t threads, int32_t smem_bytes, bool pdl, void **arguments,
                               cudaStream_t stream, kbmla_error *err);

#endif
