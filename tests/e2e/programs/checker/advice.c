// Memory that is dropped, replaced or not inherited without an event of the kernel. The contents
// are away when that happens.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <stdio.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

static void modify_every(struct area *area, struct numbers *numbers) {
    for (uint64_t page = 0; page < area->pages; page++) modify_page(area, page, numbers);
    verify_all(area);
}

static struct area part(const char *test) {
    return area_new(test, options.bytes / PAGE_BYTES / 2);
}

static void finish(struct area *area) {
    say(area->test, area->pages, digest(area));
    area_free(area);
}

static void expect_end(pid_t pid, const char *test) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) die("waitpid");
    if (status != 0) fail(test, "a child's memory was wrong");
}

static void map_anew(struct area *area) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *at = mmap(area->at, area->pages * PAGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at != area->at) die("mmap at a fixed address");
}

// Every other round by `syscall`, as libraries do that bring their own numbers.
static void advise(struct area *area, int advice, unsigned round) {
    long bytes = (long)(area->pages * PAGE_BYTES);
    int result = round % 2 == 0 ? madvise(area->at, (size_t)bytes, advice)
                                : (int)syscall(SYS_madvise, area->at, bytes, advice);
    if (result != 0) die("madvise");
}

static void fork_with(const char *test, int advice, int undo, uint64_t stream,
                      void (*in_child)(struct area *)) {
    struct numbers numbers = numbers_new(stream);
    struct area kept = part(test), advised = part(test);
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_every(&advised, &numbers);
        advise(&advised, advice, round);
        modify_every(&kept, &numbers); // `advised` leaves meanwhile.
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) {
            in_child(&advised);
            modify_every(&advised, &numbers);
            modify_every(&kept, &numbers);
            verify_all(&advised);
            _exit(0);
        }
        modify_every(&advised, &numbers);
        modify_every(&kept, &numbers);
        expect_end(child, test);
        advise(&advised, undo, round);
        pid_t other = fork();
        if (other == 0) {
            verify_all(&advised);
            verify_all(&kept);
            _exit(0);
        }
        expect_end(other, test);
    }
    area_free(&advised);
    finish(&kept);
}

static void expect_empty(struct area *area) {
    expect_zero(area, 0, area->pages);
}

static void expect_hole(struct area *area) {
    map_anew(area);
    expect_empty(area);
}

void test_wipe_on_fork(void) {
    fork_with("wipe-on-fork", MADV_WIPEONFORK, MADV_KEEPONFORK, 5000, expect_empty);
}

void test_dont_fork(void) {
    fork_with("dont-fork", MADV_DONTFORK, MADV_DOFORK, 5100, expect_hole);
}

void test_guard(void) {
    struct numbers numbers = numbers_new(5200);
    struct area kept = part("guard"), guarded = part("guard");
    for (unsigned round = 0; round < options.rounds * 2; round++) {
        modify_every(&guarded, &numbers);
        modify_every(&kept, &numbers);
        advise(&guarded, MADV_GUARD_INSTALL, round);
        modify_every(&kept, &numbers);
        advise(&guarded, MADV_GUARD_REMOVE, round);
        expect_empty(&guarded);
    }
    area_free(&guarded);
    finish(&kept);
}

void test_shm_remap(void) {
    struct numbers numbers = numbers_new(5300);
    struct area kept = part("shm-remap"), replaced = part("shm-remap");
    int segment = shmget(IPC_PRIVATE, replaced.pages * PAGE_BYTES, IPC_CREAT | 0600);
    if (segment < 0) die("shmget");
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_every(&replaced, &numbers);
        modify_every(&kept, &numbers);
        if (shmat(segment, replaced.at, SHM_REMAP) != (void *)replaced.at) die("shmat");
        replaced.at[0] = 1;
        modify_every(&kept, &numbers);
        if (shmdt(replaced.at) != 0) die("shmdt");
        map_anew(&replaced);
        expect_empty(&replaced);
    }
    if (shmctl(segment, IPC_RMID, NULL) != 0) die("shmctl");
    area_free(&replaced);
    finish(&kept);
}
