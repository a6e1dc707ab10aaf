/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the C sources and the CUDA launchers, not installed: error macros and the table of a
 * backend's entry points. kbmla.c validates everything and is the only caller of the table, so a
 * backend may rely on checked arguments.
 */
#ifndef KBMLA_INTERNAL_H
#define KBMLA_INTERNAL_H

#include "kbmla.h"
#include "rules.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills err (if any) and returns status. */
kbmla_status kbmla_fail(kbmla_error *err, kbmla_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#define RETURN_IF(condition, err, status, ...)                                                     \
    do {                                                                                           \
        if (condition)                                                                             \
            return kbmla_fail((err), (status), __VA_ARGS__);                                       \
    } while (0)

#define FORWARD_IF_ERROR(call)                                                                     \
    do {                                                                                           \
        kbmla_status forwarded_status = (call);                                                    \
        if (forwarded_status != KBMLA_OK)                                                          \
            return forwarded_status;                                                               \
    } while (0)

/* `decode` computes the splits; `reduce`, right behind it with the same arguments, merges them.
 * With args->pdl it may read lengths and plan before its wait for decode. */
struct kbmla_backend_table {
    kbmla_status (*plan)(const kbmla_config *, const kbmla_sizes *, const kbmla_plan_args *,
                         struct CUstream_st *, kbmla_error *);
    kbmla_status (*decode)(const kbmla_config *, const kbmla_sizes *, const kbmla_decode_args *,
                           struct CUstream_st *, kbmla_error *);
    kbmla_status (*reduce)(const kbmla_config *, const kbmla_sizes *, const kbmla_decode_args *,
                           struct CUstream_st *, kbmla_error *);
};

/* ------------------------------------------------------------------ CPU backend, csrc/cpu/ */

kbmla_status kbmla_cpu_plan(const kbmla_config *config, const kbmla_sizes *sizes,
                            const kbmla_plan_args *args, struct CUstream_st *stream,
                            kbmla_error *err);
kbmla_status kbmla_cpu_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                              const kbmla_decode_args *args, struct CUstream_st *stream,
                              kbmla_error *err); /* the splits; no merge */
kbmla_status kbmla_cpu_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                              const kbmla_decode_args *args, struct CUstream_st *stream,
                              kbmla_error *err);

/* ------------------------------------------------------------------ CUDA backend, csrc/cuda/ */

/* Facts of a card that launches depend on. */
typedef struct kbmla_cuda_device {
    int32_t num_sms;
    int32_t smem_per_block; /* bytes, with the opt-in */
    int32_t smem_per_sm;
    int32_t has_pdl;          /* programmatic dependent launch: SM90 and later */
    int32_t is_sm90;          /* compute capability 9.0, which alone runs sm_90a kernels */
    int32_t plans_in_cluster; /* the planner's cluster of blocks fits */
} kbmla_cuda_device;

/* Facts of the current device; queried once per device, then cached. */
kbmla_status kbmla_cuda_current_device(kbmla_cuda_device *device, kbmla_error *err);

/* Width of the wave of the portable decode. */
int32_t kbmla_cuda_decode_clusters(const kbmla_sizes *sizes, const kbmla_cuda_device *device);

/* One-time attributes of the kernels that a config uses on the current device. */
kbmla_status kbmla_cuda_decode_prepare(const kbmla_sizes *sizes, const kbmla_cuda_device *device,
                                       kbmla_error *err);

kbmla_status kbmla_cuda_plan(const kbmla_config *config, const kbmla_sizes *sizes,
                             const kbmla_plan_args *args, struct CUstream_st *stream,
                             kbmla_error *err);
kbmla_status kbmla_cuda_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                               const kbmla_decode_args *args, struct CUstream_st *stream,
                               kbmla_error *err);
kbmla_status kbmla_cuda_reduce(const kbmla_config *config, const kbmla_sizes *sizes,
                               const kbmla_decode_args *args, struct CUstream_st *stream,
                               kbmla_error *err);

/* ------------------------------------------------------------------ SM90 backend, csrc/sm90/
 * Planner and reduce are those of csrc/cuda/. */

int32_t kbmla_sm90_decode_clusters(const kbmla_sizes *sizes, const kbmla_cuda_device *device);
kbmla_status kbmla_sm90_decode_prepare(const kbmla_sizes *sizes, const kbmla_cuda_device *device,
                                       kbmla_error *err);
kbmla_status kbmla_sm90_decode(const kbmla_config *config, const kbmla_sizes *sizes,
                               const kbmla_decode_args *args, struct CUstream_st *stream,
                               kbmla_error *err);

/* ------------------------------------------------------------------ views used by backends */

static inline int32_t kbmla_readable_length(const kbmla_decode_args *args, int32_t batch) {
    return kbmla_clamp_length(args->lengths[batch], args->max_pages * args->page_size);
}

static inline int32_t kbmla_partial_base(const kbmla_config *config, const kbmla_sizes *sizes,
                                         const int32_t *work, int32_t batch,
                                         int32_t planned_count) {
    return kbmla_checked_base(work[sizes->list_len - config->max_requests + batch], planned_count,
                              sizes->num_q_tiles, sizes->max_partials);
}

#ifdef __cplusplus
}
#endif

#endif
