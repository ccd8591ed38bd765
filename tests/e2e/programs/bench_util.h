// What faultbench.c and zerofloor.c share, so that their figures compare: the clock, the histogram,
// the order of the pages, and the stamps. Header only: each program is built from one file by plain
// `cc`.
#ifndef AQUIFER_BENCH_UTIL_H
#define AQUIFER_BENCH_UTIL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE_BYTES = 4096, PAGE_WORDS = PAGE_BYTES / 8 };

// An access slower than this is taken for a fault: no cached access is, every fault is.
#define FAULT_LATENCY_US 1.0

_Noreturn static inline void die(const char *what) {
    perror(what);
    exit(2);
}

// ---- clock --------------------------------------------------------------------------------------

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// The cycle counter costs some 20 ns in a virtual machine, the clock up to ten times that. The
// fence keeps it from being read before the loads that come before it have ended.
static inline uint64_t ticks(void) {
#if defined(__x86_64__)
    __builtin_ia32_lfence();
    return __builtin_ia32_rdtsc();
#else
    return now_ns();
#endif
}

static double ticks_per_us;

static inline void calibrate_ticks(void) {
    uint64_t start_ns = now_ns(), start = ticks();
    while (now_ns() - start_ns < 50000000u) {
    }
    uint64_t end = ticks(), end_ns = now_ns();
    ticks_per_us = (double)(end - start) * 1000.0 / (double)(end_ns - start_ns);
}

// ---- histogram: logarithmic, 32 steps to each doubling (an error of 3 % at most) ----------------

enum { HISTOGRAM_STEP_BITS = 5, HISTOGRAM_SLOTS = 64 << HISTOGRAM_STEP_BITS };

struct histogram {
    uint64_t slots[HISTOGRAM_SLOTS];
    uint64_t count;
    uint64_t sum_ticks;
};

static inline unsigned histogram_slot(uint64_t value) {
    if (value < (1u << HISTOGRAM_STEP_BITS)) return (unsigned)value;
    unsigned shift = 63u - (unsigned)__builtin_clzll(value) - HISTOGRAM_STEP_BITS;
    return ((shift + 1) << HISTOGRAM_STEP_BITS) + (unsigned)((value >> shift) - (1u << HISTOGRAM_STEP_BITS));
}

static inline void histogram_add(struct histogram *h, uint64_t value_ticks) {
    h->slots[histogram_slot(value_ticks)]++;
    h->count++;
    h->sum_ticks += value_ticks;
}

static inline double histogram_slot_us(unsigned slot) {
    unsigned shift = slot >> HISTOGRAM_STEP_BITS;
    double low = slot & ((1u << HISTOGRAM_STEP_BITS) - 1);
    if (shift > 0) low = (low + 0.5 + (1u << HISTOGRAM_STEP_BITS)) * (double)(1ull << (shift - 1));
    return low / ticks_per_us;
}

// The latency that a share `quantile` of all values does not exceed; 0 if there are none.
static inline double histogram_us(const struct histogram *h, double quantile) {
    uint64_t wanted = (uint64_t)(quantile * (double)h->count), seen = 0;
    for (unsigned slot = 0; slot < HISTOGRAM_SLOTS; slot++) {
        seen += h->slots[slot];
        if (seen > wanted || (seen == h->count && seen > 0)) return histogram_slot_us(slot);
    }
    return 0;
}

static inline double histogram_mean_us(const struct histogram *h) {
    return h->count == 0 ? 0 : (double)h->sum_ticks / (double)h->count / ticks_per_us;
}

// ---- order of the pages -------------------------------------------------------------------------

static inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// A permutation of 0..count without a table: a table would be memory that is paged, too.
struct order {
    uint64_t count, key;
    unsigned half_bits;
    bool random;
};

static inline struct order order_new(uint64_t count, bool random, uint64_t key) {
    struct order order = {.count = count, .key = key, .half_bits = 1, .random = random};
    while ((1ull << (2 * order.half_bits)) < count) order.half_bits++;
    return order;
}

static inline uint64_t order_at(const struct order *order, uint64_t step) {
    if (!order->random) return step;
    uint64_t mask = (1ull << order->half_bits) - 1, value = step;
    do { // A Feistel network permutes a power of four; values past the end walk on to one within.
        uint64_t left = value >> order->half_bits, right = value & mask;
        for (unsigned round = 0; round < 4; round++) {
            uint64_t next = left ^ (mix64(right ^ (order->key + round * 0x632BE59Bu)) & mask);
            left = right;
            right = next;
        }
        value = (left << order->half_bits) | right;
    } while (value >= order->count);
    return value;
}

// ---- stamps: what a page holds, from its index and version --------------------------------------

// Half of each page is random and half repeats, so that a device that compresses gets about 2:1,
// neither the gift of empty pages nor a worst case.
enum { RANDOM_WORDS = PAGE_WORDS / 2 };

static inline uint64_t stamp_word(uint64_t page, uint64_t version, unsigned word) {
    uint64_t base = mix64(page * 0x10001u + version);
    return word < RANDOM_WORDS ? mix64(base + word) : base;
}

static inline void stamp_fill(volatile uint64_t *at, uint64_t page, uint64_t version) {
    for (unsigned word = 0; word < PAGE_WORDS; word++) at[word] = stamp_word(page, version, word);
}

// The words that a pass looks at: both ends, and two that differ from page to page.
enum { STAMP_SAMPLES = 4 };

static inline void stamp_samples(uint64_t page, unsigned samples[STAMP_SAMPLES]) {
    samples[0] = 0;
    samples[1] = 2 + (unsigned)(page % (RANDOM_WORDS - 2));
    samples[2] = RANDOM_WORDS + (unsigned)(mix64(page) % (RANDOM_WORDS - 1));
    samples[3] = PAGE_WORDS - 1;
}

// ---- the rest -----------------------------------------------------------------------------------

// Moves the calling thread to one processor; -1 leaves it where it is.
static inline void pin_to(int cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) die("sched_setaffinity");
}

static inline uint64_t parse_bytes(const char *text) {
    char *end;
    double value = strtod(text, &end);
    switch (*end) {
    case 'k': case 'K': value *= 1u << 10; break;
    case 'm': case 'M': value *= 1u << 20; break;
    case 'g': case 'G': value *= 1u << 30; break;
    case 0: break;
    default: value = 0;
    }
    if (value < PAGE_BYTES || value > 1e15) {
        fprintf(stderr, "not a size between 4K and 1e15: %s\n", text);
        exit(2);
    }
    return (uint64_t)value / PAGE_BYTES * PAGE_BYTES;
}

// Anonymous memory in small pages: one huge page would hide 511 faults.
static inline void *map_small_pages(uint64_t bytes, bool populate) {
    void *area =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) die("mmap of the working set");
    madvise(area, bytes, MADV_NOHUGEPAGE);
    if (populate) memset(area, 1, bytes);
    return area;
}

static inline void print_latencies(const char *name, const struct histogram *h) {
    printf(",\"%s\":{\"count\":%llu,\"mean_us\":%.3f,\"p50_us\":%.3f,\"p90_us\":%.3f,"
           "\"p99_us\":%.3f,\"p999_us\":%.3f}",
           name, (unsigned long long)h->count, histogram_mean_us(h), histogram_us(h, 0.5),
           histogram_us(h, 0.9), histogram_us(h, 0.99), histogram_us(h, 0.999));
}

#endif
