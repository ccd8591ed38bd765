// Children that are made where the agent's socket has no name: under another root, in other
// namespaces, as sandboxes do.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <sched.h>
#include <stdio.h>
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
