// fork, fork in a child, exec and spawn: every process has its own view of the memory.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static const char *const CHILD_VARIABLE = "CHECKER_CHILD";

static struct area shared;

pid_t forked(void) {
    pid_t pid = fork();
    if (pid < 0) die("fork");
    return pid;
}

int status_of(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) die("waitpid");
    return status;
}

void expect_end(pid_t pid, const char *test, const char *otherwise) {
    if (status_of(pid) != 0) fail(test, otherwise);
}

static void modify_every(struct area *area, uint64_t first, uint64_t step, struct numbers *numbers) {
    for (uint64_t page = first; page < area->pages; page += step) modify_page(area, page, numbers);
}

// The grandchild inherits what its parent has changed, and changes it again.
static _Noreturn void child_work(unsigned round) {
    struct numbers numbers = numbers_new(600 + round);
    modify_every(&shared, 0, 2, &numbers);
    pid_t grandchild = forked();
    if (grandchild == 0) {
        struct numbers own = numbers_new(700 + round);
        modify_every(&shared, 1, 4, &own);
        verify_all(&shared);
        _exit(0);
    }
    modify_every(&shared, 0, 4, &numbers);
    verify_all(&shared);
    expect_end(grandchild, "fork", "the grandchild's memory was wrong");
    verify_all(&shared);
    _exit(0);
}

// ---- exec ---------------------------------------------------------------------------------------

// A program that this one starts: it checks its arguments and environment, and uses memory of its
// own.
int executed_child(int argc, char **argv) {
    if (argc != 4 || strcmp(argv[3], "last argument") != 0) fail("exec", "the arguments were wrong");
    const char *variable = getenv(CHILD_VARIABLE);
    if (variable == NULL || strcmp(variable, argv[2]) != 0) fail("exec", "the environment was wrong");
    struct numbers numbers = numbers_new(800);
    struct area area = area_new("exec", (8u << 20) / PAGE_BYTES);
    for (unsigned round = 0; round < 3; round++) modify_every(&area, 0, 1, &numbers);
    verify_all(&area);
    area_free(&area);
    return 0;
}

static void execute(unsigned round, bool spawn) {
    char value[32];
    snprintf(value, sizeof value, "round %u", round);
    if (setenv(CHILD_VARIABLE, value, 1) != 0) die("setenv");
    char *arguments[] = {"checker", "--executed-child", value, "last argument", NULL};
    pid_t pid;
    if (spawn) { // glibc starts it with vfork: the child runs in this memory until it has its own.
        errno = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ);
        if (errno != 0) die("posix_spawn");
    } else {
        pid = forked();
        if (pid == 0) {
            execv("/proc/self/exe", arguments);
            die("execv");
        }
    }
    expect_end(pid, "fork", spawn ? "the spawned program failed" : "the executed program failed");
    unsetenv(CHILD_VARIABLE);
}

// ---- the test -----------------------------------------------------------------------------------

// A thread goes on with memory of its own while the process forks.
static atomic_bool stop;

static void *bystander(void *unused) {
    struct numbers numbers = numbers_new(900);
    struct area own = area_new("fork bystander", shared.pages / 8);
    while (!atomic_load(&stop)) modify_every(&own, 0, 1, &numbers);
    verify_all(&own);
    area_free(&own);
    return unused;
}

void test_fork(void) {
    struct numbers numbers = numbers_new(1000);
    shared = area_new("fork", options.bytes / PAGE_BYTES / 2);
    modify_every(&shared, 0, 1, &numbers);
    pthread_t thread;
    atomic_store(&stop, false);
    if (pthread_create(&thread, NULL, bystander, NULL) != 0) die("pthread_create");
    for (unsigned round = 0; round < options.rounds; round++) {
        pid_t child = forked();
        if (child == 0) child_work(round);
        modify_every(&shared, 1, 2, &numbers);
        verify_all(&shared);
        execute(round, false);
        execute(round, true);
        expect_end(child, "fork", "the child's memory was wrong");
        verify_all(&shared);
        // After the child's end the pages are shared with nobody, and yet not as they were.
        modify_every(&shared, round % 3, 3, &numbers);
    }
    // A child that is killed while it works takes nothing with it.
    pid_t killed = forked();
    if (killed == 0) {
        for (;;) modify_every(&shared, 0, 1, &numbers);
    }
    modify_every(&shared, 0, 2, &numbers);
    kill(killed, SIGKILL);
    int status;
    while (waitpid(killed, &status, 0) < 0)
        if (errno != EINTR) die("waitpid");
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail("fork",
        "the killed child had ended before");
    modify_every(&shared, 1, 2, &numbers);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    verify_all(&shared);
    say(shared.test, shared.pages, digest(&shared));
    area_free(&shared);
}

// ---- both sides of a fork write what they share -------------------------------------------------

enum { STORMS = 10 };

static void write_hot(struct area *area, uint64_t pages, uint32_t version) {
    for (uint64_t page = 0; page < pages; page++) write_page(area, page, version);
}

// As fast as they can: whoever looks from outside sees what became of it only afterwards.
void test_fork_storm(void) {
    struct area area = area_new("fork storm", options.bytes / PAGE_BYTES);
    uint64_t hot = area.pages / 5;
    write_hot(&area, area.pages, 1);
    for (uint32_t storm = 0; storm < STORMS * options.rounds; storm++) {
        write_hot(&area, hot, 3 * storm + 2);
        pid_t child = forked();
        if (child == 0) {
            write_hot(&area, hot, 3 * storm + 4);
            for (uint64_t page = 0; page < hot; page++) verify_page(&area, page);
            _exit(0);
        }
        write_hot(&area, hot, 3 * storm + 3);
        expect_end(child, "fork", "the storming child's memory was wrong");
        for (uint64_t page = 0; page < hot; page++) verify_page(&area, page);
    }
    verify_all(&area);
    say(area.test, area.pages, digest(&area));
    area_free(&area);
}

// ---- many children at once ----------------------------------------------------------------------

enum { CHILDREN = 64, WRITTEN_PART = 13 };

// All children are there at the same time. Each reads what they share and writes a part of it.
void test_family(void) {
    struct area area = area_new("family", options.bytes / PAGE_BYTES);
    for (uint64_t page = 0; page < area.pages; page++) write_page(&area, page, 1);
    pid_t children[CHILDREN];
    for (unsigned i = 0; i < CHILDREN; i++) {
        children[i] = forked();
        if (children[i] != 0) continue;
        for (uint64_t page = i % WRITTEN_PART; page < area.pages; page += WRITTEN_PART)
            write_page(&area, page, i + 2);
        verify_all(&area);
        _exit(0);
    }
    for (unsigned i = 0; i < CHILDREN; i++) expect_end(children[i], "family", "a child's memory was wrong");
    verify_all(&area);
    say(area.test, area.pages, digest(&area));
    area_free(&area);
}
