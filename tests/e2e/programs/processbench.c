// A program that benches measure: it forks processes, each of which fills its part of the memory
// and then writes to its pages, at random or one after another. They all begin at one time and end
// after a given time, or when the program gets SIGTERM. One JSON line on stdout.
//
//   cc -O2 -o processbench processbench.c
//   processbench --processes 80 --bytes 192M --seconds 5 [--sequential]
#include "bench_util.h"
#include <getopt.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

struct options {
    uint64_t processes, bytes, seconds;
    bool sequential;
};

// What a process has found.
struct result {
    struct histogram faults;
    uint64_t touches, longest_ticks, errors;
};

// What all processes share; not paged.
struct shared {
    atomic_uint_fast64_t ready;
    atomic_bool begun, ended;
    struct result results[];
};

static struct shared *shared;

static void end(int signal) {
    (void)signal;
    atomic_store(&shared->ended, true);
}

static void note_touch(struct result *result, uint64_t ticks) {
    result->touches++;
    if ((double)ticks <= FAULT_LATENCY_US * ticks_per_us) return;
    histogram_add(&result->faults, ticks);
    if (ticks > result->longest_ticks) result->longest_ticks = ticks;
}

static void work(const struct options *options, uint64_t number) {
    struct result *result = &shared->results[number];
    uint64_t pages = options->bytes / PAGE_BYTES / options->processes, random = number + 1;
    volatile uint64_t *area = map_small_pages(pages * PAGE_BYTES, false);
    // Word 1 counts the writes of a page, so that a page that comes back old is noticed.
    unsigned char *counts = calloc(pages, 1);
    if (!counts) die("calloc");
    for (uint64_t page = 0; page < pages; page++) {
        stamp_fill(area + page * PAGE_WORDS, number << 32 | page, 0);
        area[page * PAGE_WORDS + 1] = 0;
    }
    atomic_fetch_add(&shared->ready, 1);
    while (!atomic_load(&shared->begun)) usleep(1000);
    uint64_t page = pages - 1, end_ns = now_ns() + options->seconds * 1000000000u;
    while (now_ns() < end_ns && !atomic_load(&shared->ended)) {
        page = options->sequential ? (page + 1) % pages : (random = mix64(random)) % pages;
        volatile uint64_t *at = area + page * PAGE_WORDS;
        uint64_t start = ticks();
        uint64_t count = at[1]++;
        note_touch(result, ticks() - start);
        result->errors += (unsigned char)count != counts[page]++;
        unsigned samples[STAMP_SAMPLES];
        stamp_samples(page, samples);
        for (unsigned i = 0; i < STAMP_SAMPLES; i++) {
            if (samples[i] != 1) {
                result->errors += at[samples[i]] != stamp_word(number << 32 | page, 0, samples[i]);
            }
        }
    }
}

static void report(const struct options *options, double seconds) {
    static struct result all;
    for (uint64_t i = 0; i < options->processes; i++) {
        const struct result *one = &shared->results[i];
        for (unsigned slot = 0; slot < HISTOGRAM_SLOTS; slot++)
            all.faults.slots[slot] += one->faults.slots[slot];
        all.faults.count += one->faults.count;
        all.faults.sum_ticks += one->faults.sum_ticks;
        all.touches += one->touches;
        all.errors += one->errors;
        if (one->longest_ticks > all.longest_ticks) all.longest_ticks = one->longest_ticks;
    }
    printf("{\"bench\":\"processbench\",\"processes\":%llu,\"seconds\":%.3f,\"touches\":%llu",
           (unsigned long long)options->processes, seconds, (unsigned long long)all.touches);
    print_latencies("faults", &all.faults);
    printf(",\"longest_us\":%.1f,\"errors\":%llu}\n", (double)all.longest_ticks / ticks_per_us,
           (unsigned long long)all.errors);
}

static struct options parse(int argc, char **argv) {
    static const struct option names[] = {{"processes", required_argument, NULL, 'p'},
                                          {"bytes", required_argument, NULL, 'b'},
                                          {"seconds", required_argument, NULL, 's'},
                                          {"sequential", no_argument, NULL, 'q'},
                                          {NULL, 0, NULL, 0}};
    struct options o = {.processes = 1, .bytes = 64u << 20, .seconds = 5};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'p': o.processes = strtoull(optarg, NULL, 10); break;
        case 'b': o.bytes = parse_bytes(optarg); break;
        case 's': o.seconds = strtoull(optarg, NULL, 10); break;
        case 'q': o.sequential = true; break;
        default: exit(2);
        }
    }
    if (optind != argc || o.processes == 0 || o.bytes / PAGE_BYTES < o.processes) exit(2);
    return o;
}

int main(int argc, char **argv) {
    struct options options = parse(argc, argv);
    uint64_t bytes = sizeof(struct shared) + options.processes * sizeof(struct result);
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) die("mmap of the results");
    struct sigaction on_end = {.sa_handler = end, .sa_flags = SA_RESTART};
    if (sigaction(SIGTERM, &on_end, NULL) != 0) die("sigaction");
    calibrate_ticks();
    for (uint64_t i = 0; i < options.processes; i++) {
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) {
            work(&options, i);
            _exit(0);
        }
    }
    while (atomic_load(&shared->ready) < options.processes) usleep(1000);
    uint64_t start_ns = now_ns();
    atomic_store(&shared->begun, true);
    int failed = 0;
    for (int status; wait(&status) > 0;) failed |= status;
    report(&options, (double)(now_ns() - start_ns) / 1e9);
    return failed != 0;
}
