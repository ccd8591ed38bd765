// Thousands of threads come and go, on stacks of malloc's memory, too, while the memory is under
// pressure. The kernel writes into a thread's control block when it ends, and a join waits for
// that.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 16, STACK_BYTES = 256 << 10, BATCHES_A_ROUND = 64 };

static void start(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    errno = pthread_create(thread, attributes, run, argument);
    if (errno != 0) die("pthread_create");
}

static void join(pthread_t thread, void *expected) {
    void *result;
    errno = pthread_join(thread, &result);
    if (errno != 0) die("pthread_join");
    if (result != expected) fail("threads", "a thread's result was wrong");
}

// ---- on_threads ---------------------------------------------------------------------------------

struct job {
    void (*work)(unsigned);
    unsigned number;
};

static void *run_job(void *argument) {
    struct job *job = argument;
    job->work(job->number);
    return job;
}

void on_threads(void (*work)(unsigned)) {
    pthread_t threads[64];
    struct job jobs[64];
    for (unsigned i = 0; i < options.threads; i++) {
        jobs[i] = (struct job){work, i};
        start(&threads[i], NULL, run_job, &jobs[i]);
    }
    for (unsigned i = 0; i < options.threads; i++) join(threads[i], &jobs[i]);
}

// ---- the test -----------------------------------------------------------------------------------

static struct area shared;
static atomic_bool stop;
static _Thread_local uint64_t own_words[64];

// The pressure: walks over all but the last pages, which are the short threads'.
static void *sweep(void *unused) {
    struct numbers numbers = numbers_new(1100);
    struct area swept = area_new("threads sweep", options.bytes / PAGE_BYTES * 3 / 4);
    while (!atomic_load(&stop))
        for (uint64_t page = 0; page < swept.pages && !atomic_load(&stop); page++) modify_page(&swept,
            page, &numbers);
    verify_all(&swept);
    area_free(&swept);
    return unused;
}

// Uses its stack, its thread-local memory, malloc, and one page of its own.
static void *short_thread(void *argument) {
    uint64_t page = (uint64_t)(uintptr_t)argument - 1;
    struct numbers numbers = numbers_new(1200 + page);
    volatile uint64_t on_stack[2048];
    for (unsigned i = 0; i < 2048; i++) on_stack[i] = mix64(page + i);
    for (unsigned i = 0; i < 64; i++) {
        if (own_words[i] != 0) fail("threads", "thread-local memory was not fresh");
        own_words[i] = mix64(page ^ i);
    }
    unsigned char *heap = malloc(20000);
    if (heap == NULL) die("malloc");
    memset(heap, (int)(page & 0xff), 20000);
    modify_page(&shared, page, &numbers);
    for (unsigned i = 0; i < 2048; i++)
        if (on_stack[i] != mix64(page + i)) fail("threads", "a stack's content was wrong");
    for (unsigned i = 0; i < 64; i++)
        if (own_words[i] != mix64(page ^ i)) fail("threads", "thread-local memory was wrong");
    for (unsigned i = 0; i < 20000; i++)
        if (heap[i] != (page & 0xff)) fail("threads", "the heap's content was wrong");
    free(heap);
    return argument;
}

static void run_batch(uint64_t first_page) {
    pthread_t threads[BATCH];
    unsigned char *stacks[BATCH] = {0};
    for (unsigned i = 0; i < BATCH; i++) {
        pthread_attr_t attributes;
        if (pthread_attr_init(&attributes) != 0) die("pthread_attr_init");
        if (i % 2 == 0) {
            // An odd place, as malloc gives it; the thread library aligns within.
            stacks[i] = malloc(STACK_BYTES);
            if (stacks[i] == NULL) die("malloc of a stack");
            errno = pthread_attr_setstack(&attributes, stacks[i], STACK_BYTES);
            if (errno != 0) die("pthread_attr_setstack");
        }
        start(&threads[i], &attributes, short_thread, (void *)(uintptr_t)(first_page + i + 1));
        pthread_attr_destroy(&attributes);
    }
    for (unsigned i = 0; i < BATCH; i++) {
        join(threads[i], (void *)(uintptr_t)(first_page + i + 1));
        free(stacks[i]);
    }
}

void test_threads(void) {
    uint64_t count = (uint64_t)options.rounds * BATCHES_A_ROUND * BATCH;
    shared = area_new("threads", BATCH * BATCHES_A_ROUND);
    pthread_t sweeper;
    atomic_store(&stop, false);
    start(&sweeper, NULL, sweep, NULL);
    for (uint64_t i = 0; i < count; i += BATCH) run_batch(i % shared.pages);
    atomic_store(&stop, true);
    join(sweeper, NULL);
    verify_all(&shared);
    say(shared.test, shared.pages, digest(&shared));
    area_free(&shared);
}
