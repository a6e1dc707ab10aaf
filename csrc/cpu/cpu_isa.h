/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Choice of the CPU kernels. The best instruction set of the machine is taken unless a test has
 * selected another; nothing reads the environment.
 */
#ifndef KBMLA_CPU_ISA_H
#define KBMLA_CPU_ISA_H

#include "../kbmla.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kbmla_cpu_kernels; /* cpu_tile.h */

/* The kernels in use. A decode fetches them once, so a selection made meanwhile does not mix. */
const struct kbmla_cpu_kernels *kbmla_cpu_current_kernels(void);

/* Forces "avx512", "avx2" or "generic" for the whole process, or returns to the automatic choice
 * with NULL. UNSUPPORTED, and no change, if this machine or build has no such kernels. */
kbmla_status kbmla_cpu_select_isa(const char *isa);

#ifdef __cplusplus
}
#endif

#endif
