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

/* ------------------------------------------------------------------ views used by backends */

/* KV tokens of request `batch` that decode may read: its length, within 0 and its table row. */
static inline int32_t kbmla_readable_length(const kbmla_decode_args *args, int32_t batch) {
    int64_t most = args->max_pages * args->page_size;
    int32_t length = kbmla_max(args->lengths[batch], 0);
    return length < most ? length : (int32_t)most;
}

/* First partial slot of request `batch`, from the tail of the work list; -1 if a foreign plan put
 * a slot there that the workspace does not have. */
static inline int32_t kbmla_partial_base(const kbmla_config *config, const kbmla_sizes *sizes,
                                         const int32_t *work, int32_t batch,
                                         int32_t planned_count) {
    int32_t base = ~work[sizes->list_len - config->max_requests + batch];
    int64_t end = (int64_t)base + (int64_t)planned_count * sizes->num_q_tiles;
    return base >= 0 && end <= sizes->max_partials ? base : -1;
}

#ifdef __cplusplus
}
#endif

#endif
