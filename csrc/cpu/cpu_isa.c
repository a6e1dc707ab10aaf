/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Run-time choice among the kernel tables of cpu_tile_*.c, best first. The selection is one atomic
 * index, so that a test may change it while other threads decode: each decode runs whole on the
 * table it fetched.
 */
#include "cpu_isa.h"
#include "cpu_tile.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#if defined(__AVX__)
#error "compile cpu_isa.c without -mavx flags: it runs before the machine is known to have AVX"
#endif

extern const kbmla_cpu_kernels kbmla_cpu_kernels_avx512;
extern const kbmla_cpu_kernels kbmla_cpu_kernels_avx2;
extern const kbmla_cpu_kernels kbmla_cpu_kernels_generic;

#if defined(__x86_64__)

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
}

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#endif

static int has_generic(void) {
    return 1;
}

static const struct {
    const kbmla_cpu_kernels *kernels;
    int (*is_supported)(void);
} choices[] = {
#if defined(__x86_64__)
    {&kbmla_cpu_kernels_avx512, has_avx512},
    {&kbmla_cpu_kernels_avx2, has_avx2},
#endif
    {&kbmla_cpu_kernels_generic, has_generic},
};

enum { NUM_CHOICES = sizeof choices / sizeof choices[0], AUTOMATIC = -1 };

static atomic_int selected = AUTOMATIC;

const kbmla_cpu_kernels *kbmla_cpu_current_kernels(void) {
    int index = atomic_load_explicit(&selected, memory_order_relaxed);
    if (index == AUTOMATIC) {
        index = 0;
        while (!choices[index].is_supported())
            index++;
        /* Keeps a selection that another thread made meanwhile. */
        int expected = AUTOMATIC;
        if (!atomic_compare_exchange_strong(&selected, &expected, index))
            index = expected;
    }
    return choices[index].kernels;
}

kbmla_status kbmla_cpu_select_isa(const char *isa) {
    if (isa == NULL) {
        atomic_store(&selected, AUTOMATIC);
        return KBMLA_OK;
    }
    for (int i = 0; i < NUM_CHOICES; i++) {
        if (strcmp(isa, choices[i].kernels->isa) == 0 && choices[i].is_supported()) {
            atomic_store(&selected, i);
            return KBMLA_OK;
        }
    }
    return KBMLA_UNSUPPORTED;
}

const char *kbmla_cpu_isa(void) {
    return kbmla_cpu_current_kernels()->isa;
}
