// The usual malloc benchmarks, in small, after their well-known namesakes: mallocbench NAME BYTES
// OPERATIONS. Prints one line of JSON.
//
// larson:  a server: threads replace random blocks of a set of BYTES by others of random size, then
// hand the set over to fresh threads. random:  alloc-test: blocks of many sizes, short-lived and
// long-lived, in a set of BYTES. xmalloc: one half of the threads allocates, the other frees.
// thrash:  cache-scratch: each thread frees a block that another has allocated, then allocates,
// writes and frees one of its own, over and over. zipf:    BYTES of blocks, touched by Zipf's law:
// few of them most of the time.
//
// Every block carries a word known from its place and size, at both ends; they are checked when it
// is touched and when it is freed.
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 2, GENERATIONS = 4, QUEUE = 1024, BATCH = 120, SCRATCH_WRITES = 100 };

struct block {
    uint64_t *words;
    uint32_t count;
};

struct worker {
    pthread_t thread;
    uint64_t state, operations, errors;
    struct block *blocks;
    uint64_t count;
    // For `zipf`: what part of all touches goes to blocks up to this rank.
    const double *cumulated;
    const uint32_t *places;
    uint64_t *scratch;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static uint64_t draw(struct worker *worker)
{
    return mix(worker->state += 0x9e3779b97f4a7c15);
}

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "mallocbench: %s\n", what);
    exit(2);
}

static uint64_t stamp(const struct block *block)
{
    return mix((uintptr_t)block->words ^ block->count);
}

static struct block take(uint64_t bytes)
{
    struct block block = {.count = (uint32_t)(bytes / 8 + 1)};
    block.words = malloc(block.count * 8);
    if (!block.words)
        die("no memory");
    block.words[0] = block.words[block.count - 1] = stamp(&block);
    return block;
}

static void touch(struct worker *worker, const struct block *block)
{
    uint64_t expected = stamp(block);
    worker->errors += block->words[0] != expected || block->words[block->count - 1] != expected;
}

static void give(struct worker *worker, struct block block)
{
    touch(worker, &block);
    free(block.words);
}

// Sizes as of a server's objects, 16 bytes to 2 KiB: 1 KiB on average.
static uint64_t server_bytes(struct worker *worker)
{
    return 16 + draw(worker) % 2032;
}

static uint64_t mixed_bytes(struct worker *worker)
{
    uint64_t word = draw(worker);
    return (uint64_t)16 << word % 9 | (word >> 32 & 15);
}

static void *larson(void *argument)
{
    struct worker *worker = argument;
    for (uint64_t at = 0; at < worker->operations; at++) {
        struct block *block = &worker->blocks[draw(worker) % worker->count];
        give(worker, *block);
        *block = take(server_bytes(worker));
    }
    return NULL;
}

static void *random_sizes(void *argument)
{
    struct worker *worker = argument;
    for (uint64_t at = 0; at < worker->operations; at++) {
        // Most die young: three of four are replaced within the youngest sixteenth.
        uint64_t word = draw(worker), bound = word % 4 ? worker->count / 16 : worker->count;
        struct block *block = &worker->blocks[(word >> 8) % bound];
        give(worker, *block);
        *block = take(mixed_bytes(worker));
    }
    return NULL;
}

static void *zipf(void *argument)
{
    struct worker *worker = argument;
    for (uint64_t at = 0; at < worker->operations; at++) {
        double share = (double)(draw(worker) >> 11) / (double)(1ull << 53);
        uint64_t low = 0, high = worker->count - 1;
        while (low < high) {
            uint64_t middle = (low + high) / 2;
            if (worker->cumulated[middle] > share)
                high = middle;
            else
                low = middle + 1;
        }
        struct block *block = &worker->blocks[worker->places[low]];
        touch(worker, block);
        // Written, too, with what is there already.
        *(volatile uint64_t *)&block->words[block->count / 2] = stamp(block);
    }
    return NULL;
}

static struct block *queue[QUEUE];
static unsigned queue_first, queue_used;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_changed = PTHREAD_COND_INITIALIZER;

static void *produce(void *argument)
{
    struct worker *worker = argument;
    for (uint64_t at = 0; at < worker->operations; at += BATCH) {
        struct block *batch = malloc(BATCH * sizeof *batch);
        if (!batch)
            die("no memory");
        for (unsigned place = 0; place < BATCH; place++)
            batch[place] = take(mixed_bytes(worker));
        pthread_mutex_lock(&queue_lock);
        while (queue_used == QUEUE)
            pthread_cond_wait(&queue_changed, &queue_lock);
        queue[(queue_first + queue_used++) % QUEUE] = batch;
        pthread_cond_broadcast(&queue_changed);
        pthread_mutex_unlock(&queue_lock);
    }
    return NULL;
}

static void *consume(void *argument)
{
    struct worker *worker = argument;
    for (uint64_t at = 0; at < worker->operations; at += BATCH) {
        pthread_mutex_lock(&queue_lock);
        while (queue_used == 0)
            pthread_cond_wait(&queue_changed, &queue_lock);
        struct block *batch = queue[queue_first];
        queue_first = (queue_first + 1) % QUEUE;
        queue_used--;
        pthread_cond_broadcast(&queue_changed);
        pthread_mutex_unlock(&queue_lock);
        for (unsigned place = 0; place < BATCH; place++)
            give(worker, batch[place]);
        free(batch);
    }
    return NULL;
}

static void *thrash(void *argument)
{
    struct worker *worker = argument;
    free(worker->scratch);
    for (uint64_t at = 0; at < worker->operations; at++) {
        volatile uint64_t *words = malloc(8);
        if (!words)
            die("no memory");
        words[0] = 0;
        for (unsigned write = 0; write < SCRATCH_WRITES; write++)
            words[0] += write;
        free((void *)words);
    }
    return NULL;
}

static struct worker workers[THREADS];

static void run(void *(*first)(void *), void *(*second)(void *))
{
    for (unsigned at = 0; at < THREADS; at++)
        if (pthread_create(&workers[at].thread, NULL, at % 2 ? second : first, &workers[at]))
            die("no thread");
    for (unsigned at = 0; at < THREADS; at++)
        pthread_join(workers[at].thread, NULL);
}

// Fill each thread's part of the set.
static void fill(uint64_t bytes, uint64_t mean_bytes, uint64_t (*draw_bytes)(struct worker *))
{
    for (unsigned at = 0; at < THREADS; at++) {
        struct worker *worker = &workers[at];
        worker->count = bytes / THREADS / mean_bytes + 16;
        worker->blocks = malloc(worker->count * sizeof *worker->blocks);
        if (!worker->blocks)
            die("no memory");
        for (uint64_t place = 0; place < worker->count; place++)
            worker->blocks[place] = take(draw_bytes(worker));
    }
}

static void prepare_zipf(void)
{
    uint64_t count = workers[0].count;
    double *cumulated = malloc(count * sizeof *cumulated), sum = 0;
    uint32_t *places = malloc(count * sizeof *places);
    if (!cumulated || !places)
        die("no memory");
    struct worker drawer = {.state = 99};
    for (uint64_t at = 0; at < count; at++) {
        cumulated[at] = sum += pow((double)(at + 1), -0.99);
        uint64_t other = draw(&drawer) % (at + 1);
        places[at] = places[other];
        places[other] = (uint32_t)at;
    }
    for (uint64_t at = 0; at < count; at++)
        cumulated[at] /= sum;
    for (unsigned at = 0; at < THREADS; at++) {
        workers[at].cumulated = cumulated;
        workers[at].places = places;
    }
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int count, char **words)
{
    if (count != 4)
        die("usage: mallocbench larson|random|xmalloc|thrash|zipf BYTES OPERATIONS");
    const char *name = words[1];
    uint64_t bytes = strtoull(words[2], NULL, 10), operations = strtoull(words[3], NULL, 10);
    for (unsigned at = 0; at < THREADS; at++)
        workers[at] = (struct worker){.state = at + 1, .operations = operations / THREADS};
    double start = now();
    if (strcmp(name, "larson") == 0) {
        fill(bytes, 1040, server_bytes);
        start = now();
        for (unsigned at = 0; at < THREADS; at++)
            workers[at].operations /= GENERATIONS;
        for (unsigned generation = 0; generation < GENERATIONS; generation++)
            run(larson, larson);
    } else if (strcmp(name, "random") == 0) {
        fill(bytes, 930, mixed_bytes);
        start = now();
        run(random_sizes, random_sizes);
    } else if (strcmp(name, "zipf") == 0) {
        fill(bytes, 1040, server_bytes);
        prepare_zipf();
        start = now();
        run(zipf, zipf);
    } else if (strcmp(name, "xmalloc") == 0) {
        run(produce, consume);
    } else if (strcmp(name, "thrash") == 0) {
        for (unsigned at = 0; at < THREADS; at++)
            workers[at].scratch = malloc(8);
        run(thrash, thrash);
    } else {
        die("no such benchmark");
    }
    double seconds = now() - start;
    uint64_t errors = 0;
    for (unsigned at = 0; at < THREADS; at++) {
        struct worker *worker = &workers[at];
        for (uint64_t place = 0; worker->blocks && place < worker->count; place++)
            touch(worker, &worker->blocks[place]);
        errors += worker->errors;
    }
    printf("{\"ops\":%llu,\"seconds\":%.6f,\"errors\":%llu}\n", (unsigned long long)operations, seconds,
           (unsigned long long)errors);
    return errors ? 1 : 0;
}
