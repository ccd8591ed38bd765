// The floors that `aquifer bench faults` compares with: what a page fault costs before anything is
// stored anywhere. `plain` is the kernel's own fault on fresh anonymous memory. The others serve
// missing faults of a userfaultfd from memory that is resident in the server, in the cheapest way
// there is:
//
//   --mode plain            the kernel gives a zero page
//   --mode uffd             a server reads the fault and answers with UFFDIO_COPY
//   --mode sigbus           the faulting thread copies the page in itself, in a signal handler
//   --who thread|process    the server is a thread of this process, or another process
// --place same|other      the server is pinned to the processor of the faulting thread, or to the
//   next
//   --wait block|spin       the server sleeps in read(), or asks again and again
//   --source pages|one      each page has its own source (cold), or one page serves all (hot)
//
//   cc -O2 -pthread -o zerofloor zerofloor.c
//   zerofloor --bytes 256M --mode uffd --place same --pattern random --op read --passes 2
#include "bench_util.h"
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum mode { MODE_PLAIN, MODE_UFFD, MODE_SIGBUS };

struct options {
    uint64_t bytes, passes;
    enum mode mode;
    bool process, other_cpu, spin, one_source, random, write;
    int cpu;
};

static struct options options;
static int uffd = -1;
static unsigned char *area, *source;

// ---- the server ---------------------------------------------------------------------------------

static const unsigned char *source_of(uint64_t address) {
    return options.one_source ? source : source + (address - (uint64_t)(uintptr_t)area);
}

static void copy_in(uint64_t address) {
    struct uffdio_copy copy = {
        .dst = address, .src = (uint64_t)(uintptr_t)source_of(address), .len = PAGE_BYTES};
    // EEXIST: the page came in another way. ESRCH: the faulting process is gone, and so is our
    // work.
    if (ioctl(uffd, UFFDIO_COPY, &copy) != 0 && errno != EEXIST && errno != ESRCH) {
        perror("UFFDIO_COPY");
        _exit(2);
    }
}

// Serves until the process ends: a blocking read on a userfaultfd cannot be called off in a clean
// way.
_Noreturn static void serve(void) {
    int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
    pin_to(options.other_cpu ? (options.cpu + 1) % cpus : options.cpu);
    for (;;) {
        struct uffd_msg message;
        ssize_t got = read(uffd, &message, sizeof message);
        if (got == (ssize_t)sizeof message && message.event == UFFD_EVENT_PAGEFAULT)
            copy_in(message.arg.pagefault.address & ~(uint64_t)(PAGE_BYTES - 1));
    }
}

static void *serve_thread(void *unused) {
    (void)unused;
    serve();
}

static void on_sigbus(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    copy_in((uint64_t)(uintptr_t)info->si_addr & ~(uint64_t)(PAGE_BYTES - 1));
}

static void open_uffd(void) {
    bool blocking = options.mode == MODE_UFFD && !options.spin;
    uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | (blocking ? 0 : O_NONBLOCK));
    if (uffd < 0) die("userfaultfd (root, or sysctl vm.unprivileged_userfaultfd=1, is needed)");
    struct uffdio_api api = {.api = UFFD_API, .features = options.mode == MODE_SIGBUS ? UFFD_FEATURE_SIGBUS
        : 0};
    if (ioctl(uffd, UFFDIO_API, &api) != 0) die("UFFDIO_API");
    struct uffdio_register range = {.range = {(uint64_t)(uintptr_t)area, options.bytes},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(uffd, UFFDIO_REGISTER, &range) != 0) die("UFFDIO_REGISTER");
}

// The source is filled before the server starts, and forked with it: it is warm in either.
static void start_server(void) {
    uint64_t source_bytes = options.one_source ? PAGE_BYTES : options.bytes;
    source = map_small_pages(source_bytes, true);
    for (uint64_t page = 0; page < source_bytes / PAGE_BYTES; page++)
        stamp_fill((volatile uint64_t *)(void *)(source + page * PAGE_BYTES), page, 0);
    open_uffd();
    if (options.mode == MODE_SIGBUS) {
        struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER};
        if (sigaction(SIGBUS, &action, NULL) != 0) die("sigaction");
    } else if (options.process) {
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); // It must not outlive the program it serves.
            serve();
        }
    } else {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve_thread, NULL) != 0) die("pthread_create");
        pthread_detach(thread);
    }
}

// ---- the measured walk --------------------------------------------------------------------------

static uint64_t expected(uint64_t page, unsigned word) {
    if (options.mode == MODE_PLAIN) return 0;
    return stamp_word(options.one_source ? 0 : page, 0, word);
}

// Every page of a pass is missing, so every touch is a fault.
static uint64_t pass(uint64_t number, struct histogram *faults) {
    uint64_t pages = options.bytes / PAGE_BYTES, errors = 0;
    if (madvise(area, options.bytes, MADV_DONTNEED) != 0) die("MADV_DONTNEED");
    struct order order = order_new(pages, options.random, mix64(number));
    for (uint64_t step = 0; step < pages; step++) {
        uint64_t page = order_at(&order, step);
        volatile uint64_t *at = (volatile uint64_t *)(void *)(area + page * PAGE_BYTES);
        uint64_t start = ticks();
        if (options.write)
            at[1] = number;
        else
            (void)at[0];
        histogram_add(faults, ticks() - start);
        unsigned samples[STAMP_SAMPLES];
        stamp_samples(page, samples);
        for (unsigned i = 0; i < STAMP_SAMPLES; i++) errors += at[samples[i]] != expected(page, samples[i]);
    }
    return errors;
}

static void report(const struct histogram *faults, double seconds, uint64_t errors) {
    static const char *const modes[] = {"plain", "uffd", "sigbus"};
    printf("{\"bench\":\"zerofloor\",\"mode\":\"%s\"", modes[options.mode]);
    if (options.mode == MODE_UFFD)
        printf(",\"who\":\"%s\",\"place\":\"%s\",\"wait\":\"%s\"", options.process ? "process" : "thread",
               options.other_cpu ? "other" : "same", options.spin ? "spin" : "block");
    if (options.mode != MODE_PLAIN) printf(",\"source\":\"%s\"", options.one_source ? "one" : "pages");
    printf(",\"pattern\":\"%s\",\"op\":\"%s\",\"bytes\":%llu,\"passes\":%llu,\"ops\":%llu,"
           "\"seconds\":%.6f,\"mb_per_s\":%.2f",
           options.random ? "random" : "seq", options.write ? "write" : "read",
           (unsigned long long)options.bytes,
           (unsigned long long)options.passes, (unsigned long long)faults->count, seconds,
           (double)faults->count * PAGE_BYTES / 1e6 / seconds);
    print_latencies("faults", faults);
    printf(",\"verified_pages\":%llu,\"errors\":%llu}\n", (unsigned long long)faults->count,
           (unsigned long long)errors);
}

_Noreturn static void usage(void) {
    fputs("usage: zerofloor --bytes N[K|M|G] [--mode plain|uffd|sigbus] [--who thread|process]"
          " [--place same|other] [--wait block|spin] [--source pages|one] [--pattern seq|random]"
          " [--op read|write] [--passes P] [--cpu N]\n", stderr);
    exit(2);
}

// True for the second word, false for the first.
static bool one_of(const char *text, const char *first, const char *second) {
    if (strcmp(text, first) != 0 && strcmp(text, second) != 0) usage();
    return strcmp(text, second) == 0;
}

static void parse(int argc, char **argv) {
    static const struct option names[] = {
        {"bytes", required_argument, NULL, 'b'},  {"mode", required_argument, NULL, 'm'},
        {"who", required_argument, NULL, 'w'},    {"place", required_argument, NULL, 'l'},
        {"wait", required_argument, NULL, 't'},   {"source", required_argument, NULL, 's'},
        {"pattern", required_argument, NULL, 'p'}, {"op", required_argument, NULL, 'o'},
        {"passes", required_argument, NULL, 'n'}, {"cpu", required_argument, NULL, 'c'}, {NULL, 0, NULL, 0}};
    options = (struct options){.bytes = 64u << 20, .passes = 1};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'b': options.bytes = parse_bytes(optarg); break;
        case 'm':
            if (strcmp(optarg, "plain") == 0) options.mode = MODE_PLAIN;
            else options.mode = one_of(optarg, "uffd", "sigbus") ? MODE_SIGBUS : MODE_UFFD;
            break;
        case 'w': options.process = one_of(optarg, "thread", "process"); break;
        case 'l': options.other_cpu = one_of(optarg, "same", "other"); break;
        case 't': options.spin = one_of(optarg, "block", "spin"); break;
        case 's': options.one_source = one_of(optarg, "pages", "one"); break;
        case 'p': options.random = one_of(optarg, "seq", "random"); break;
        case 'o': options.write = one_of(optarg, "read", "write"); break;
        case 'n': options.passes = strtoull(optarg, NULL, 10); break;
        case 'c': options.cpu = atoi(optarg); break;
        default: usage();
        }
    }
    if (optind != argc || options.passes == 0 || options.cpu < 0) usage();
    if (options.spin && !options.other_cpu) {
        fputs("a server that spins on the faulting thread's own processor only takes its time: use "
            "--place other\n", stderr);
        exit(2);
    }
}

int main(int argc, char **argv) {
    static struct histogram faults;
    parse(argc, argv);
    calibrate_ticks();
    area = map_small_pages(options.bytes, false);
    if (options.mode != MODE_PLAIN) start_server();
    pin_to(options.cpu);
    uint64_t errors = 0, busy_ns = 0;
    for (uint64_t i = 1; i <= options.passes; i++) {
        uint64_t start_ns = now_ns();
        errors += pass(i, &faults);
        busy_ns += now_ns() - start_ns;
    }
    report(&faults, (double)busy_ns / 1e9, errors);
    fflush(stdout);
    // The server may be asleep in a read that nothing ends: leave without waiting for it.
    _exit(errors == 0 ? 0 : 1);
}
