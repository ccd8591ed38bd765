// Children that are made where the agent's socket has no name: under another root, in other
// namespaces, as sandboxes do.
#include "content.h"
#include "tests.h"
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// Makes an empty folder the root, which is gone then.
static void hide_all_files(void) {
    char folder[64];
    snprintf(folder, sizeof folder, "/tmp/aquifer-checker-%d", (int)getpid());
    if (mkdir(folder, 0700) != 0 || chdir(folder) != 0 || rmdir(folder) != 0) die("mkdir");
    if (chroot(".") != 0) die("chroot");
}

static void expect_success(pid_t child, const char *test) {
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) fail(test, "a child failed");
}

// Children, and a child of each, have the memory that their parent had.
static void fork_and_verify(struct area *area, struct numbers *numbers) {
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_and_verify(area, numbers);
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) {
            modify_and_verify(area, numbers);
            pid_t grandchild = fork();
            if (grandchild < 0) _exit(2);
            modify_and_verify(area, numbers);
            if (grandchild != 0) expect_success(grandchild, area->test);
            verify_all(area);
            _exit(0);
        }
        modify_and_verify(area, numbers);
        expect_success(child, area->test);
        verify_all(area);
    }
}

void test_chroot(void) {
    struct numbers numbers = numbers_new(5600);
    struct area area = area_half("chroot");
    modify_and_verify(&area, &numbers);
    hide_all_files();
    fork_and_verify(&area, &numbers);
    finish(&area);
}

// The first child is the first process of a PID namespace, and no user of its namespace has a
// number outside of it.
void test_namespaces(void) {
    struct numbers numbers = numbers_new(5700);
    struct area area = area_half("namespaces");
    modify_and_verify(&area, &numbers);
    const int others = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC;
    if (unshare(others) != 0) die("unshare");
    hide_all_files();
    pid_t first = fork();
    if (first < 0) die("fork");
    if (first == 0) {
        if (getpid() != 1) _exit(2);
        use_up_descriptors(true);
        // What Aquifer has started for this process is no child of it.
        if (wait(NULL) >= 0 || errno != ECHILD) _exit(3);
        fork_and_verify(&area, &numbers);
        _exit(0);
    }
    modify_and_verify(&area, &numbers);
    expect_success(first, area.test);
    verify_all(&area);
    finish(&area);
}

// ---- the first process of a PID namespace -------------------------------------------------------

static void await_alone(void) {
    while (kill(-1, 0) == 0 || errno != ESRCH) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        sched_yield();
    }
}

// Processes that /proc lists. Returns 0 if this namespace has no /proc.
static int listed(void) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("proc", "/proc", "proc", 0, NULL) != 0)
        return 0;
    int count = 0;
    DIR *folder = opendir("/proc");
    if (folder == NULL) die("/proc");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] >= '0' && entry->d_name[0] <= '9';
    closedir(folder);
    return count;
}

static void be_first(struct area *area, struct numbers *numbers) {
    for (int has_proc = 0; has_proc < 2; has_proc++) {
        pid_t job = forked();
        if (job == 0) {
            modify_and_verify(area, numbers);
            for (;;) pause();
        }
        // It is the only one that gets the signal.
        if (kill(-1, SIGKILL) != 0) die("kill");
        int status = status_of(job);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail("first", "the job ended otherwise");
        await_alone();
        modify_and_verify(area, numbers);
        if (has_proc == 0 && listed() > 1) fail("first", "there is a process that nobody has made");
    }
}

void test_first(void) {
    struct numbers numbers = numbers_new(8200);
    struct area area = area_half("first");
    modify_and_verify(&area, &numbers);
    pid_t outer = forked();
    if (outer == 0) {
        if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) die("unshare");
        pid_t first = forked();
        if (first == 0) {
            be_first(&area, &numbers);
            _exit(0);
        }
        expect_end(first, "first", "the first process of the namespace failed");
        _exit(0);
    }
    expect_end(outer, "first", "the maker of the namespace failed");
    modify_and_verify(&area, &numbers);
    finish(&area);
}
