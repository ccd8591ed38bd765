// Children made in every way by a process whose memory is of every kind. Each process checks and
// rewrites every page of its own, in either order of their ends, and never sees what another one
// writes.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <linux/sched.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIECES = 4, AREAS = PIECES + 3, MOVED = AREAS - 1, STACK_BYTES = 256 << 10 };

static const char *way;
static struct area areas[AREAS];
static unsigned char *places[2]; // The moved area is in one of them.
static uint64_t quarter;         // Pages of each kind.
static unsigned char *stack;     // In the heap: it may leave and come back like all else.

// ---- memory of every kind -----------------------------------------------------------------------

static void write_every(struct area *area) {
    for (uint64_t page = 0; page < area->pages; page++) write_page(area, page, 1);
}

static void move_area(unsigned round) {
    struct area *area = &areas[MOVED];
    unsigned char *to = places[(round + 1) % 2];
    uint64_t bytes = area->pages * PAGE_BYTES;
    if (area->at == to) return;
    if (mremap(area->at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) die("mremap");
    area->at = to;
}

static void make_memory(void) {
    quarter = options.bytes / PAGE_BYTES / 4 / PIECES * PIECES;
    // Of the heap, whatever its size.
    if (mallopt(M_MMAP_THRESHOLD, 32 << 20) == 0) die("mallopt");
    for (unsigned piece = 0; piece < PIECES; piece++) {
        void *at = malloc(quarter / PIECES * PAGE_BYTES);
        if (at == NULL) die("malloc");
        memset(at, 0, quarter / PIECES * PAGE_BYTES);
        areas[piece] = area_over(way, at, quarter / PIECES);
    }
    stack = malloc(STACK_BYTES);
    if (stack == NULL) die("malloc of a stack");
    areas[PIECES] = area_new(way, quarter);
    for (unsigned place = 0; place < 2; place++) places[place] = map_pages(quarter);
    areas[MOVED] = area_over(way, places[0], quarter);
    void *end = sbrk((intptr_t)((quarter + 1) * PAGE_BYTES));
    if (end == (void *)-1) die("sbrk");
    void *first_page = (void *)(((uintptr_t)end + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    areas[PIECES + 1] = area_over(way, first_page, quarter);
    for (unsigned i = 0; i < AREAS; i++) {
        areas[i].first = i * quarter;
        write_every(&areas[i]);
    }
}

static void verify_areas(void) {
    for (unsigned i = 0; i < AREAS; i++) verify_all(&areas[i]);
}

// Every page, the odd or the even ones first: so two processes meet each page in both orders.
static void rewrite_areas(unsigned odd, struct numbers *numbers) {
    for (unsigned half = 0; half < 2; half++)
        for (unsigned i = 0; i < AREAS; i++)
            for (uint64_t page = (half + odd) % 2; page < areas[i].pages; page += 2)
                modify_page(&areas[i], page, numbers);
    verify_areas();
}

// ---- ways to make a child -----------------------------------------------------------------------

static pid_t checked(pid_t pid) {
    if (pid < 0) die(way);
    return pid;
}

// No argument of `clone`: it would have to lie where no child's stack comes to lie.
static void (*next_work)(void);

static int call(void *unused) {
    (void)unused;
    next_work();
    _exit(0);
}

// Runs `work` in a child that has memory of its own.
static pid_t child_with_memory(void (*work)(void)) {
    pid_t pid = -1;
    next_work = work;
    if (strcmp(way, "fork") == 0) pid = fork();
    if (strcmp(way, "_Fork") == 0) pid = _Fork();
    // Without libc, and so without what libc calls in a child.
    if (strcmp(way, "raw-clone") == 0) pid = (pid_t)syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
    if (strcmp(way, "raw-clone3") == 0) {
        struct clone_args arguments = {.exit_signal = SIGCHLD};
        pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    }
    if (strcmp(way, "clone") == 0) {
        return checked(clone(call, stack + STACK_BYTES, SIGCHLD, NULL));
    }
    if (checked(pid) == 0) call(NULL);
    return pid;
}

// ---- children with memory of their own ----------------------------------------------------------

static unsigned current_round;
static int told[2];   // Closed by who has gone.
static int answer[2]; // What a child has to say whose parent is gone.

static void child_goes_first(void) {
    struct numbers numbers = numbers_new(2000 + current_round);
    verify_areas();
    rewrite_areas(0, &numbers);
}

static void child_remains(void) {
    char byte = 1;
    struct numbers numbers = numbers_new(2100 + current_round);
    close(told[1]);
    rewrite_areas(1, &numbers);
    // Nothing comes: it waits for its parent's end.
    if (read(told[0], &byte, 1) != 0) fail(way, "the parent said something");
    rewrite_areas(0, &numbers);
    if (write(answer[1], &byte, 1) != 1) die("write to a pipe");
}

static void parent_goes_first(void) {
    struct numbers numbers = numbers_new(2200 + current_round);
    child_with_memory(child_remains);
    rewrite_areas(0, &numbers);
}

static void outlive_parent(void) {
    char byte = 0;
    if (pipe(told) != 0 || pipe(answer) != 0) die("pipe");
    pid_t parent = child_with_memory(parent_goes_first);
    close(told[1]);
    close(told[0]);
    close(answer[1]);
    expect_end(parent, way, "the parent that goes first was wrong");
    if (read(answer[0], &byte, 1) != 1) fail(way, "the child that outlives its parent was wrong");
    close(answer[0]);
}

static void test_way(const char *name) {
    way = name;
    make_memory();
    struct numbers numbers = numbers_new(2300);
    for (current_round = 0; current_round < options.rounds; current_round++) {
        move_area(current_round);
        pid_t child = child_with_memory(child_goes_first);
        rewrite_areas(1, &numbers);
        expect_end(child, way, "the child's memory was wrong");
        verify_areas();
        outlive_parent();
        rewrite_areas(0, &numbers);
    }
    uint64_t sum = 0;
    for (unsigned i = 0; i < AREAS; i++) sum += digest(&areas[i]);
    say(way, quarter * 4, sum);
}

void test_by_fork(void) { test_way("fork"); }
void test_by_fork_alone(void) { test_way("_Fork"); }
void test_by_clone(void) { test_way("clone"); }
void test_by_raw_clone(void) { test_way("raw-clone"); }
void test_by_raw_clone3(void) { test_way("raw-clone3"); }

// ---- children that share the memory until they execute ------------------------------------------

static struct numbers shared_numbers;

// It is alone while it runs: its parent waits.
static void work_in_parents_memory(void) {
    rewrite_areas(current_round % 2, &shared_numbers);
}

static void execute_myself(void) {
    static char *arguments[] = {"checker", "--executed-child", "shared", "last argument", NULL};
    execv("/proc/self/exe", arguments);
    _exit(2);
}

static pid_t child_in_memory(void (*work)(void)) {
    if (strcmp(way, "vfork") == 0) {
        pid_t pid = checked(vfork());
        if (pid == 0) {
            work();
            _exit(0);
        }
        return pid;
    }
    next_work = work;
    return checked(clone(call, stack + STACK_BYTES, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL));
}

static pid_t spawned(void) {
    extern char **environ;
    static char *arguments[] = {"checker", "--executed-child", "shared", "last argument", NULL};
    pid_t pid;
    errno = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ);
    if (errno != 0) die("posix_spawn");
    return pid;
}

static void test_sharing(const char *name) {
    way = name;
    if (setenv("CHECKER_CHILD", "shared", 1) != 0) die("setenv");
    make_memory();
    shared_numbers = numbers_new(2400);
    bool spawns = strcmp(way, "spawn") == 0;
    for (current_round = 0; current_round < options.rounds; current_round++) {
        move_area(current_round);
        if (spawns) work_in_parents_memory();
        else expect_end(child_in_memory(work_in_parents_memory), way,
                        "the child in its parent's memory was wrong");
        verify_areas();
        pid_t child = spawns ? spawned() : child_in_memory(execute_myself);
        rewrite_areas(1, &shared_numbers);
        expect_end(child, way, "the executed program failed");
    }
    uint64_t sum = 0;
    for (unsigned i = 0; i < AREAS; i++) sum += digest(&areas[i]);
    say(way, quarter * 4, sum);
}

void test_by_vfork(void) { test_sharing("vfork"); }
void test_by_clone_vm(void) { test_sharing("clone-vm"); }
void test_by_spawn(void) { test_sharing("spawn"); }
