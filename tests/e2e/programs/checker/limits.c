// Threads whose end the kernel reports in ordinary memory, children of a process that has used up
// its descriptors, and blocks that look like stacks.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RAW_THREADS = 4, THREAD_STACK_PAGES = 64, LIMIT = 64 };

static int gate[2];

// It has no control block of its own, so it uses plain system calls.
static int wait_at_gate(void *unused) {
    char byte;
    (void)unused;
    while (syscall(SYS_read, gate[0], &byte, 1) != 1) {}
    syscall(SYS_exit, 0);
    return 0;
}

void test_cleared_word(void) {
    struct numbers numbers = numbers_new(5300);
    struct area kept = area_half("cleared-word");
    unsigned char *words = map_pages(RAW_THREADS * THREAD_STACK_PAGES);
    unsigned char *stacks = map_pages(RAW_THREADS * THREAD_STACK_PAGES);
    const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
                      CLONE_CHILD_CLEARTID;
    if (pipe(gate) != 0) die("pipe");
    int *word[RAW_THREADS];
    for (unsigned i = 0; i < RAW_THREADS; i++) {
        word[i] = (int *)(void *)(words + i * THREAD_STACK_PAGES * PAGE_BYTES + 64);
        *word[i] = 1;
        void *top = stacks + (i + 1) * THREAD_STACK_PAGES * PAGE_BYTES - 64;
        if (clone(wait_at_gate, top, flags, NULL, NULL, NULL, word[i]) < 0) die("clone");
    }
    // What they have leaves meanwhile.
    for (unsigned round = 0; round < options.rounds + 1; round++) modify_and_verify(&kept, &numbers);
    if (write(gate[1], "1234", RAW_THREADS) != RAW_THREADS) die("write");
    for (unsigned i = 0; i < RAW_THREADS; i++)
        while (__atomic_load_n(word[i], __ATOMIC_SEQ_CST) == 1)
            syscall(SYS_futex, word[i], FUTEX_WAIT, 1, NULL);
    say(kept.test, kept.pages, digest(&kept));
    area_free(&kept);
}

// Opens as many files as this process may now, or ever.
struct rlimit use_up_descriptors(bool is_hard) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) die("getrlimit");
    if (limit.rlim_max <= LIMIT) die("a higher limit of open files is needed");
    limit.rlim_cur = LIMIT;
    if (is_hard) limit.rlim_max = LIMIT;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) die("setrlimit");
    while (fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0) >= 0) {}
    if (errno != EMFILE) die("fcntl");
    return limit;
}

static void full_fork(const char *test, bool is_hard) {
    struct numbers numbers = numbers_new(5400);
    struct area kept = area_half(test);
    // Root may raise the limit, but not from a user namespace.
    if (is_hard && unshare(CLONE_NEWUSER) != 0) die("unshare");
    struct rlimit limit = use_up_descriptors(is_hard);
    for (unsigned round = 0; round < options.rounds + 1; round++) {
        modify_and_verify(&kept, &numbers);
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) {
            modify_and_verify(&kept, &numbers);
            bool is_full = open("/dev/null", O_RDONLY) < 0 && errno == EMFILE;
            struct rlimit own;
            bool is_same = getrlimit(RLIMIT_NOFILE, &own) == 0 && own.rlim_cur == limit.rlim_cur &&
                           own.rlim_max == limit.rlim_max;
            _exit(is_full && is_same && wait(NULL) < 0 && errno == ECHILD ? 0 : 3);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) fail(test, "a child failed");
        verify_all(&kept);
    }
    say(kept.test, kept.pages, digest(&kept));
    area_free(&kept);
}

void test_full_fork(void) { full_fork("full-fork", false); }

void test_fullest_fork(void) { full_fork("fullest-fork", true); }

// A process that may have few files for ever.
void test_fewest_fork(void) {
    enum { FEWEST = 5 };
    struct numbers numbers = numbers_new(5450);
    struct area kept = area_half("fewest-fork");
    // Root may raise the limit, but not from a user namespace.
    if (unshare(CLONE_NEWUSER) != 0) die("unshare");
    struct rlimit limit = {FEWEST, FEWEST};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) die("setrlimit");
    modify_and_verify(&kept, &numbers);
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
        modify_and_verify(&kept, &numbers);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) fail("fewest-fork", "a child failed");
    modify_and_verify(&kept, &numbers);
    say(kept.test, kept.pages, digest(&kept));
    area_free(&kept);
}

// As allocators do that guard large blocks: each has an inaccessible page right below it.
void test_guarded_blocks(void) {
    enum { BLOCKS = 16 };
    struct numbers numbers = numbers_new(5500);
    struct area blocks[BLOCKS];
    uint64_t pages = options.bytes / PAGE_BYTES / 2 / BLOCKS, sum = 0;
    for (unsigned i = 0; i < BLOCKS; i++) {
        uint64_t bytes = (pages + 2) * PAGE_BYTES;
        unsigned char *guard = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (guard == MAP_FAILED) die("mmap");
        if (mprotect(guard + PAGE_BYTES, pages * PAGE_BYTES, PROT_READ | PROT_WRITE) != 0) die("mprotect");
        blocks[i] = area_over("guarded-blocks", guard + PAGE_BYTES, pages);
    }
    for (unsigned round = 0; round < 4 * options.rounds; round++)
        for (unsigned i = 0; i < BLOCKS; i++) modify_and_verify(&blocks[i], &numbers);
    for (unsigned i = 0; i < BLOCKS; i++) {
        verify_all(&blocks[i]);
        sum ^= digest(&blocks[i]);
        area_free(&blocks[i]);
    }
    say("guarded-blocks", pages * BLOCKS, sum);
}
