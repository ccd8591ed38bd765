// Checks an allocator: malloccheck torture BYTES THREADS | functions | giveback BYTES
//
// torture: threads that together hold about BYTES allocate, grow, shrink, pass on and free blocks
// at random; each word of each block is known from
// its place and its block. Then the process forks, and both sides check all that they have and go
// on. functions: what the manual promises of each function.
// giveback: holds BYTES, then frees all; says so each time, and waits for a line before it goes on.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS_MAX = 16, BLOCKS_MAX = 1 << 16, TURNS = 12000, SHELF = 64 };

_Noreturn static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    _exit(1);
}

#define check(what) ((what) ? (void)0 : fail("line %d: %s", __LINE__, #what))

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 31) * 0x7fb5d329728ea185;
    x = (x ^ x >> 27) * 0x81dadef4bc2dd44d;
    return x ^ x >> 33;
}

struct block {
    uint64_t *words;
    size_t count;
    uint64_t stamp;
};

static uint64_t word_of(const struct block *block, size_t at)
{
    return mix(block->stamp + at);
}

static void fill(struct block *block, size_t from)
{
    for (size_t at = from; at < block->count; at++)
        block->words[at] = word_of(block, at);
}

static void verify(const struct block *block, size_t count)
{
    for (size_t at = 0; at < count; at++)
        if (block->words[at] != word_of(block, at))
            fail("%p, word %zu of %zu: found %llx, not %llx", (void *)block->words, at, block->count,
                 (unsigned long long)block->words[at], (unsigned long long)word_of(block, at));
}

// Blocks on their way from one thread to another, which will free them.
static _Atomic(struct block *) shelf[SHELF];

struct worker {
    pthread_t thread;
    uint64_t state;
    size_t bytes, bytes_max;
    unsigned used;
    struct block blocks[BLOCKS_MAX];
};
static struct worker workers[THREADS_MAX];

static uint64_t draw(struct worker *worker, uint64_t bound)
{
    worker->state += 0x9e3779b97f4a7c15;
    return mix(worker->state) % bound;
}

static size_t draw_words(struct worker *worker)
{
    uint64_t kind = draw(worker, 100);
    return 1 + draw(worker, kind < 70 ? 128 : kind < 95 ? 4096 : kind < 99 ? 32 << 10 : 512 << 10);
}

static struct block allocate(struct worker *worker)
{
    struct block block = {.count = draw_words(worker), .stamp = mix(worker->state)};
    size_t bytes = block.count * 8;
    switch (draw(worker, 4)) {
    case 0:
        block.words = calloc(block.count, 8);
        check(block.words);
        for (size_t at = 0; at < block.count; at++)
            check(block.words[at] == 0);
        break;
    case 1: {
        void *address = NULL;
        size_t alignment = (size_t)16 << draw(worker, 12);
        check(posix_memalign(&address, alignment, bytes) == 0);
        check((uintptr_t)address % alignment == 0);
        block.words = address;
        break;
    }
    default:
        block.words = malloc(bytes);
        check(block.words);
    }
    check(malloc_usable_size(block.words) >= bytes);
    fill(&block, 0);
    return block;
}

static void resize(struct worker *worker, struct block *block)
{
    size_t count = draw_words(worker), kept = count < block->count ? count : block->count;
    uint64_t *words = realloc(block->words, count * 8);
    check(words);
    worker->bytes += count * 8 - block->count * 8;
    block->words = words;
    block->count = count;
    verify(block, kept);
    fill(block, kept);
}

// Leave it to whoever comes by; free what lay there.
static void pass_on(struct worker *worker, struct block block)
{
    struct block *passed = malloc(sizeof *passed);
    check(passed);
    *passed = block;
    struct block *found = atomic_exchange(&shelf[draw(worker, SHELF)], passed);
    if (found) {
        verify(found, found->count);
        free(found->words);
        free(found);
    }
}

static void verify_all(const struct worker *worker)
{
    for (unsigned at = 0; at < worker->used; at++)
        verify(&worker->blocks[at], worker->blocks[at].count);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    verify_all(worker);
    for (unsigned turn = 0; turn < TURNS; turn++) {
        if (worker->used < BLOCKS_MAX) {
            struct block block = allocate(worker);
            worker->bytes += block.count * 8;
            worker->blocks[worker->used++] = block;
        }
        unsigned chosen = (unsigned)draw(worker, worker->used);
        struct block *block = &worker->blocks[chosen];
        if (draw(worker, 8) == 0)
            resize(worker, block);
        while (worker->bytes >= worker->bytes_max) {
            block = &worker->blocks[draw(worker, worker->used)];
            worker->bytes -= block->count * 8;
            verify(block, block->count);
            if (draw(worker, 4) == 0)
                pass_on(worker, *block);
            else
                free(block->words);
            *block = worker->blocks[--worker->used];
        }
    }
    verify_all(worker);
    return NULL;
}

static void work_all(unsigned threads)
{
    for (unsigned at = 0; at < threads; at++)
        check(pthread_create(&workers[at].thread, NULL, work, &workers[at]) == 0);
    for (unsigned at = 0; at < threads; at++)
        check(pthread_join(workers[at].thread, NULL) == 0);
}

static void torture(size_t bytes, unsigned threads)
{
    check(threads >= 1 && threads <= THREADS_MAX);
    for (unsigned at = 0; at < threads; at++) {
        workers[at].state = mix(at + 1);
        workers[at].bytes_max = bytes / threads;
    }
    work_all(threads);
    pid_t child = fork();
    check(child >= 0);
    work_all(threads);
    if (child == 0)
        _exit(0);
    int status = 0;
    check(waitpid(child, &status, 0) == child);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (unsigned at = 0; at < threads; at++)
        while (workers[at].used > 0)
            free(workers[at].blocks[--workers[at].used].words);
    puts("all is as it was written");
}

static bool is_aligned(const void *address, size_t alignment)
{
    return (uintptr_t)address % alignment == 0;
}

static void sizes_that_cannot_be(void)
{
    // Not constants: compilers warn of those.
    volatile size_t huge = SIZE_MAX - 4096, half = SIZE_MAX / 2 + 2;
    errno = 0;
    check(malloc(huge) == NULL && errno == ENOMEM);
    errno = 0;
    check(calloc(half, 2) == NULL && errno == ENOMEM);
    void *kept = malloc(100);
    memset(kept, 7, 100);
    errno = 0;
    check(realloc(kept, huge) == NULL && errno == ENOMEM);
    check(realloc(malloc(100), 0) == NULL);
    errno = 0;
    check(reallocarray(kept, half, 2) == NULL && errno == ENOMEM);
    errno = 0;
    check(pvalloc(huge + 4095) == NULL && errno == ENOMEM);
    errno = 0;
    check(aligned_alloc(64, huge) == NULL && errno == ENOMEM);
    check(((unsigned char *)kept)[99] == 7);
    free(kept);
}

static void alignments(void)
{
    void *address = NULL;
    check(posix_memalign(&address, 3, 10) == EINVAL);
    check(posix_memalign(&address, 4, 10) == EINVAL);
    check(posix_memalign(&address, 0, 10) == EINVAL);
    volatile size_t odd = 24;
    errno = 0;
    check(aligned_alloc(odd, 48) == NULL && errno == EINVAL);
    for (size_t alignment = 8; alignment <= 8 << 20; alignment *= 2) {
        check(posix_memalign(&address, alignment, 1000) == 0 && is_aligned(address, alignment));
        free(address);
        address = aligned_alloc(alignment, alignment);
        check(address && is_aligned(address, alignment));
        free(address);
        address = memalign(alignment, 5);
        check(address && is_aligned(address, alignment));
        free(address);
    }
    address = memalign(odd, 100);
    check(address && is_aligned(address, 32));
    address = realloc(address, 1 << 20);
    check(address);
    free(address);
    address = valloc(1);
    check(address && is_aligned(address, 4096));
    free(address);
    address = pvalloc(4097);
    check(address && is_aligned(address, 4096) && malloc_usable_size(address) >= 8192);
    free(address);
}

static void functions(void)
{
    for (size_t bytes = 0; bytes < 5000; bytes++) {
        char *one = malloc(bytes), *other = malloc(bytes);
        check(one && other && one != other);
        // What holds more than 8 bytes may hold anything.
        check(is_aligned(one, bytes > 8 ? 16 : 8) && malloc_usable_size(one) >= bytes);
        memset(one, 1, malloc_usable_size(one));
        free(other);
        one = realloc(one, bytes * 3 + 1);
        for (size_t at = 0; at < bytes; at++)
            check(one[at] == 1);
        free(one);
        char *zeros = calloc(bytes, 3);
        check(zeros);
        for (size_t at = 0; at < bytes * 3; at++)
            check(zeros[at] == 0);
        free(zeros);
    }
    free(NULL);
    check(malloc_usable_size(NULL) == 0);
    void *fresh = realloc(NULL, 10);
    check(fresh);
    free(fresh);
    fresh = reallocarray(NULL, 10, 10);
    check(fresh && malloc_usable_size(fresh) >= 100);
    errno = 77;
    free(fresh);
    check(errno == 77);
    // Zero again, after all of it was used.
    for (unsigned round = 0; round < 3; round++) {
        size_t bytes = (size_t)40 << 20;
        unsigned char *large = calloc(1, bytes);
        check(large);
        for (size_t at = 0; at < bytes; at += 512)
            check(large[at] == 0);
        memset(large, 9, bytes);
        free(large);
    }
    check(malloc_trim(0) == 1);
    sizes_that_cannot_be();
    alignments();
    puts("all functions do what they should");
}

static void stop_at(const char *what)
{
    puts(what);
    fflush(stdout);
    char line[16];
    check(fgets(line, sizeof line, stdin));
}

static void give_back(size_t bytes)
{
    enum { BLOCK_BYTES = 100000 };
    size_t count = bytes / BLOCK_BYTES;
    struct block *blocks = calloc(count, sizeof *blocks);
    check(blocks);
    for (size_t at = 0; at < count; at++) {
        blocks[at] = (struct block){.words = malloc(BLOCK_BYTES), .count = BLOCK_BYTES / 8, .stamp = mix(at)};
        check(blocks[at].words);
        fill(&blocks[at], 0);
    }
    stop_at("held");
    for (size_t at = 0; at < count; at++) {
        verify(&blocks[at], blocks[at].count);
        free(blocks[at].words);
    }
    free(blocks);
    malloc_trim(0);
    stop_at("freed");
}

int main(int count, char **words)
{
    const char *mode = count > 1 ? words[1] : "";
    if (strcmp(mode, "torture") == 0 && count == 4)
        torture(strtoull(words[2], NULL, 10), (unsigned)strtoul(words[3], NULL, 10));
    else if (strcmp(mode, "functions") == 0)
        functions();
    else if (strcmp(mode, "giveback") == 0 && count == 3)
        give_back(strtoull(words[2], NULL, 10));
    else
        fail("usage: malloccheck torture BYTES THREADS | functions | giveback BYTES");
    return 0;
}
