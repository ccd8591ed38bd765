// Checks every byte of its own memory while the memory is moved, dropped, forked and passed to the
// kernel. Paging must be transparent to it.
//
//   cc -std=c11 -O2 -pthread -o checker checker/*.c
//   checker TEST|all [--bytes 256M] [--threads 4] [--rounds 2] [--seed 1]
//
// Exit status 0: all bytes were right; 1: a byte was wrong, standard error says which; 2: the test
// could not run.
#include "content.h"
#include "tests.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct test {
    const char *name;
    void (*run)(void);
    bool in_all;
};

static const struct test tests[] = {
    {"pages", test_pages, true},     {"mremap", test_mremap, true},   {"brk", test_brk, true},
    {"madvise", test_madvise, true}, {"remap", test_remap, true},     {"fork", test_fork, true},
    {"threads", test_threads, true}, {"syscalls", test_syscalls, true},
    {"protect", test_protect, true}, {"pinned", test_pinned, true},
    // Linux 5.7 and newer, and rarely used: by name only.
    {"dontunmap", test_dontunmap, false},
    // Wait for SIGUSR1.
    {"sparse", test_sparse, false},  {"read-only", test_read_only, false},
    // Waits for lines on stdin.
    {"steps", test_steps, false},
    // Both sides of a fork write all that they share, at once.
    {"fork-storm", test_fork_storm, false}, {"family", test_family, false},
    // What few programs do.
    {"daemon", test_daemon, false},     {"setuid", test_setuid, false},
    {"populate", test_populate, false}, {"direct", test_direct, false},
    {"robust", test_robust, false},     {"signal-stack", test_signal_stack, false},
    // A process as it would be without paging.
    {"alone", test_alone, false},       {"sandboxed", test_sandboxed, false},
    {"no-unshare", test_no_unshare, false},
    {"raw-exit", test_raw_exit, false}, {"stopped", test_stopped, false},
    {"traced", test_traced, false},     {"outlive", test_outlive, false},
    {"fork-exit", test_fork_exit, false},
    // Changes of memory that the kernel does not report.
    {"wipe-on-fork", test_wipe_on_fork, false}, {"dont-fork", test_dont_fork, false},
    {"wipe-on-clone", test_wipe_on_clone, false}, {"lock-all", test_lock_all, false},
    {"guard", test_guard, false},               {"shm-remap", test_shm_remap, false},
    {"grow", test_grow, false},                 {"cleared-word", test_cleared_word, false},
    {"full-fork", test_full_fork, false},       {"fullest-fork", test_fullest_fork, false},
    {"fewest-fork", test_fewest_fork, false},   {"populate-all", test_populate_all, false},
    {"chroot", test_chroot, false},             {"namespaces", test_namespaces, false},
    {"first", test_first, false},
    {"joined", test_joined, false},             {"move-several", test_move_several, false},
    {"guarded-blocks", test_guarded_blocks, false},
    // Ways to make a child; these change how malloc works.
    {"by-fork", test_by_fork, false},             {"by-fork-alone", test_by_fork_alone, false},
    {"by-clone", test_by_clone, false},           {"by-raw-clone", test_by_raw_clone, false},
    {"by-raw-clone3", test_by_raw_clone3, false}, {"by-vfork", test_by_vfork, false},
    {"by-clone-vm", test_by_clone_vm, false},     {"by-spawn", test_by_spawn, false},
};

enum { TESTS = sizeof tests / sizeof tests[0] };

_Noreturn static void usage(const char *why) {
    fprintf(stderr, "checker: %s\nusage: checker TEST|all [--bytes N[K|M|G]] [--threads T] [--rounds R] "
        "[--seed S]\ntests:",
            why);
    for (unsigned i = 0; i < TESTS; i++) fprintf(stderr, " %s", tests[i].name);
    fputc('\n', stderr);
    exit(2);
}

static uint64_t parse_number(const char *text, uint64_t least, uint64_t most) {
    char *end;
    uint64_t value = strtoull(text, &end, 10), unit = 1;
    if (end == text) usage("an option wants a number");
    if (*end == 'K' || *end == 'k') unit = 1u << 10;
    if (*end == 'M' || *end == 'm') unit = 1u << 20;
    if (*end == 'G' || *end == 'g') unit = 1u << 30;
    if (end[unit > 1] != 0 || value > most / unit
        || value * unit < least) usage("a number is out of its range");
    return value * unit;
}

static void parse_options(int argc, char **argv) {
    static const struct option names[] = {
        {"bytes", required_argument, NULL, 'b'}, {"threads", required_argument, NULL, 't'},
        {"rounds", required_argument, NULL, 'r'}, {"seed", required_argument, NULL, 's'}, {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'b': options.bytes = parse_number(optarg, 4u << 20, 1ull << 40); break;
        case 't': options.threads = (unsigned)parse_number(optarg, 1, 64); break;
        case 'r': options.rounds = (unsigned)parse_number(optarg, 1, 1u << 20); break;
        case 's': options.seed = parse_number(optarg, 0, UINT64_MAX); break;
        default: usage("an option is not known");
        }
    }
    if (optind != argc) usage("there is one argument too many");
}

int main(int argc, char **argv) {
    if (argc >= 2 && strcmp(argv[1], "--executed-child") == 0) return executed_child(argc, argv);
    if (argc < 2) usage("which test?");
    const char *wanted = argv[1];
    parse_options(argc - 1, argv + 1);
    bool all = strcmp(wanted, "all") == 0, known = all;
    for (unsigned i = 0; i < TESTS; i++) {
        if (strcmp(wanted, tests[i].name) != 0 && !(all && tests[i].in_all)) continue;
        known = true;
        tests[i].run();
    }
    if (!known) usage("no such test");
    return 0;
}
