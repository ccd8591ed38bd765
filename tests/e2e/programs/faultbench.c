// The program that `aquifer bench faults` measures: it fills memory, walks over it, times the first
// touch of every page and checks what the page holds. It knows nothing of what pages it. One JSON
// line on stdout.
//
//   cc -O2 -o faultbench faultbench.c
//   faultbench --bytes 768M --pattern random --op read --passes 2 [--warm] [--cpu N] [--seed S]
#include "bench_util.h"
#include <getopt.h>
#include <sys/resource.h>

struct options {
    uint64_t bytes, passes, seed;
    bool random, write, warm;
    int cpu;
};

struct run {
    struct options options;
    volatile uint64_t *area;
    uint64_t pages, version;
    uint64_t verified, errors;
    struct histogram touches, faults;
    uint64_t busy_ns;
    long major_faults, minor_faults;
};

static volatile uint64_t *page_at(const struct run *run, uint64_t page) {
    return run->area + page * PAGE_WORDS;
}

static void report_error(struct run *run, uint64_t page, unsigned word, uint64_t found) {
    if (run->errors++ >= 8) return;
    fprintf(stderr, "page %llu word %u at %p: found %016llx, expected %016llx\n", (unsigned long long)page,
        word,
            (void *)(uintptr_t)(page_at(run, page) + word), (unsigned long long)found,
            (unsigned long long)stamp_word(page, run->version, word));
}

// Word 1 is for the timed store of a write pass. It is not sampled, so that a store into a page
// which was not there must not spoil the other words: that is what the samples then show.
static uint64_t timed_touch(struct run *run, volatile uint64_t *at, uint64_t page) {
    uint64_t start = ticks();
    if (run->options.write)
        at[1] = stamp_word(page, run->version + 1, 1);
    else
        (void)at[0];
    return ticks() - start;
}

static void visit(struct run *run, uint64_t page, bool measured) {
    volatile uint64_t *at = page_at(run, page);
    uint64_t latency = timed_touch(run, at, page);
    if (measured) {
        histogram_add(&run->touches, latency);
        if ((double)latency > FAULT_LATENCY_US * ticks_per_us) histogram_add(&run->faults, latency);
    }
    unsigned samples[STAMP_SAMPLES];
    stamp_samples(page, samples);
    for (unsigned i = 0; i < STAMP_SAMPLES; i++) {
        uint64_t found = at[samples[i]];
        if (found != stamp_word(page, run->version, samples[i])) report_error(run, page, samples[i], found);
        if (run->options.write) at[samples[i]] = stamp_word(page, run->version + 1, samples[i]);
    }
    run->verified++;
}

static void pass(struct run *run, uint64_t number, bool measured) {
    struct order order = order_new(run->pages, run->options.random, mix64(run->options.seed + number));
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    uint64_t start_ns = now_ns();
    for (uint64_t step = 0; step < run->pages; step++) visit(run, order_at(&order, step), measured);
    uint64_t spent_ns = now_ns() - start_ns;
    getrusage(RUSAGE_THREAD, &after);
    if (measured) {
        run->busy_ns += spent_ns;
        run->major_faults += after.ru_majflt - before.ru_majflt;
        run->minor_faults += after.ru_minflt - before.ru_minflt;
    }
    if (run->options.write) run->version++;
}

// After the measured passes, every word of every page: the samples and word 1 at the last version,
// the rest as first filled.
static void verify_all(struct run *run) {
    for (uint64_t page = 0; page < run->pages; page++) {
        unsigned samples[STAMP_SAMPLES];
        stamp_samples(page, samples);
        for (unsigned word = 0; word < PAGE_WORDS; word++) {
            bool rewritten = word == 1;
            for (unsigned i = 0; i < STAMP_SAMPLES; i++) rewritten |= samples[i] == word;
            uint64_t found = page_at(run, page)[word];
            if (found != stamp_word(page, rewritten ? run->version : 0, word)) report_error(run, page,
                word, found);
        }
    }
}

static void report(const struct run *run) {
    double seconds = (double)run->busy_ns / 1e9;
    uint64_t bytes = run->touches.count * PAGE_BYTES;
    printf("{\"bench\":\"faultbench\",\"pattern\":\"%s\",\"op\":\"%s\",\"bytes\":%llu,\"passes\":%llu",
           run->options.random ? "random" : "seq", run->options.write ? "write" : "read",
           (unsigned long long)run->options.bytes, (unsigned long long)run->options.passes);
    printf(",\"ops\":%llu,\"seconds\":%.6f,\"mb_per_s\":%.2f", (unsigned long long)run->touches.count,
        seconds,
           seconds > 0 ? (double)bytes / 1e6 / seconds : 0);
    print_latencies("faults", &run->faults);
    print_latencies("touches", &run->touches);
    printf(",\"major_faults\":%ld,\"minor_faults\":%ld,\"verified_pages\":%llu,\"errors\":%llu}\n",
           run->major_faults, run->minor_faults, (unsigned long long)run->verified,
               (unsigned long long)run->errors);
}

_Noreturn static void usage(void) {
    fputs("usage: faultbench --bytes N[K|M|G] [--pattern seq|random] [--op read|write] [--passes P] [--warm]"
          " [--cpu N] [--seed S]\n", stderr);
    exit(2);
}

static struct options parse(int argc, char **argv) {
    static const struct option names[] = {
        {"bytes", required_argument, NULL, 'b'}, {"pattern", required_argument, NULL, 'p'},
        {"op", required_argument, NULL, 'o'},    {"passes", required_argument, NULL, 'n'},
        {"warm", no_argument, NULL, 'w'},        {"cpu", required_argument, NULL, 'c'},
        {"seed", required_argument, NULL, 's'},  {NULL, 0, NULL, 0}};
    struct options o = {.bytes = 256u << 20, .passes = 1, .seed = 1, .cpu = -1};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'b': o.bytes = parse_bytes(optarg); break;
        case 'p':
            o.random = strcmp(optarg, "random") == 0;
            if (!o.random && strcmp(optarg, "seq"))
                usage();
            break;
        case 'o':
            o.write = strcmp(optarg, "write") == 0;
            if (!o.write && strcmp(optarg, "read"))
                usage();
            break;
        case 'n': o.passes = strtoull(optarg, NULL, 10); break;
        case 'w': o.warm = true; break;
        case 'c': o.cpu = atoi(optarg); break;
        case 's': o.seed = strtoull(optarg, NULL, 10); break;
        default: usage();
        }
    }
    if (optind != argc || o.passes == 0) usage();
    return o;
}

int main(int argc, char **argv) {
    static struct run run;
    run.options = parse(argc, argv);
    run.pages = run.options.bytes / PAGE_BYTES;
    pin_to(run.options.cpu);
    calibrate_ticks();
    run.area = map_small_pages(run.options.bytes, false);
    for (uint64_t page = 0; page < run.pages; page++) stamp_fill(page_at(&run, page), page, 0);
    // Without the unmeasured pass, a run would begin with the last pages of the fill in memory.
    if (run.options.warm) pass(&run, 0, false);
    for (uint64_t i = 1; i <= run.options.passes; i++) pass(&run, i, true);
    verify_all(&run);
    report(&run);
    return run.errors == 0 ? 0 : 1;
}
