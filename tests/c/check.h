/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few tools the C tests share: a counting assertion, a generator of random numbers that gives
 * the same ones everywhere, and a thread pool to pass as `parallel_for`.
 */
#ifndef KBMLA_TEST_CHECK_H
#define KBMLA_TEST_CHECK_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kbmla.h"

static int num_passed, num_failed;

/* Counts; the rest, a printf format and its arguments, says which case failed. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (condition) {                                                                           \
            num_passed++;                                                                          \
        } else {                                                                                   \
            num_failed++;                                                                          \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                 \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

/* ------------------------------------------------------------------ random numbers */

static uint64_t random_state = 1;

/* splitmix64 */
static uint32_t random_bits(void) {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

/* 0 .. bound - 1 */
static int32_t random_below(int32_t bound) {
    return (int32_t)(random_bits() % (uint32_t)bound);
}

/* Close to a normal deviate: the sum of twelve uniform ones. */
static double random_normal(void) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++)
        sum += random_bits() * 0x1p-32;
    return sum;
}

/* ------------------------------------------------------------------ threads */

enum { NUM_THREADS = 4 };

typedef struct thread_job {
    kbmla_parallel_body body;
    void *context;
    int64_t count;
    atomic_llong next;
} thread_job;

static void *thread_main(void *argument) {
    thread_job *job = (thread_job *)argument;
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->count;)
        job->body(i, i + 1, job->context);
    return NULL;
}

/* kbmla_parallel_for on threads that take one index at a time, in whatever order. */
static void threads_parallel_for(int64_t count, kbmla_parallel_body body, void *context,
                                 void *pool) {
    thread_job job = {.body = body, .context = context, .count = count};
    pthread_t threads[NUM_THREADS];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, *(const size_t *)pool);
    for (int i = 0; i < NUM_THREADS; i++)
        if (pthread_create(&threads[i], &attributes, thread_main, &job) != 0)
            abort();
    for (int i = 0; i < NUM_THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_attr_destroy(&attributes);
}

#endif
