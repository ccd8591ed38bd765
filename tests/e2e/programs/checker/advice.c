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
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <signal.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

static void map_anew(struct area *area) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *at = mmap(area->at, area->pages * PAGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at != area->at) die("mmap at a fixed address");
}

// Each round in another way: by `syscall` as libraries do that bring their own numbers.
static void advise(struct area *area, int advice, unsigned round) {
    long bytes = (long)(area->pages * PAGE_BYTES);
    if (round % 3 == 0 && madvise(area->at, (size_t)bytes, advice) != 0) die("madvise");
    if (round % 3 == 1 && syscall(SYS_madvise, area->at, bytes, advice) != 0) die("madvise by syscall");
    if (round % 3 == 2) {
        struct iovec range = {area->at, (size_t)bytes};
        int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
        if (own < 0) die("pidfd_open");
        long done = syscall(SYS_process_madvise, own, &range, 1, advice, 0);
        // Older kernels take fewer advices there.
        if (done < 0 && errno == EINVAL) done = madvise(area->at, (size_t)bytes, advice);
        if (done < 0) die("process_madvise");
        close(own);
    }
}

// Without libc, so that no library notices the child.
static pid_t raw_clone(void) {
    long result;
    register long child_word __asm__("r10") = 0;
    register long storage __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(child_word), "r"(storage)
                     : "rcx", "r11", "memory");
    return (pid_t)result;
}

static void fork_with(const char *test, int advice, int undo, uint64_t stream, pid_t (*make)(void),
                      void (*in_child)(struct area *)) {
    struct numbers numbers = numbers_new(stream);
    struct area kept = area_half(test), advised = area_half(test);
    for (unsigned round = 0; round < options.rounds + 1; round++) {
        modify_and_verify(&advised, &numbers);
        advise(&advised, advice, round);
        modify_and_verify(&kept, &numbers); // `advised` leaves meanwhile.
        pid_t child = make();
        if (child < 0) die("fork");
        if (child == 0) {
            in_child(&advised);
            modify_and_verify(&advised, &numbers);
            modify_and_verify(&kept, &numbers);
            verify_all(&advised);
            _exit(0);
        }
        modify_and_verify(&advised, &numbers);
        modify_and_verify(&kept, &numbers);
        expect_end(child, test, "a child's memory was wrong");
        advise(&advised, undo, round);
        pid_t other = fork();
        if (other == 0) {
            verify_all(&advised);
            verify_all(&kept);
            _exit(0);
        }
        expect_end(other, test, "a child's memory was wrong");
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
    fork_with("wipe-on-fork", MADV_WIPEONFORK, MADV_KEEPONFORK, 5000, fork, expect_empty);
}

void test_wipe_on_clone(void) {
    fork_with("wipe-on-clone", MADV_WIPEONFORK, MADV_KEEPONFORK, 5050, raw_clone, expect_empty);
}

void test_dont_fork(void) {
    fork_with("dont-fork", MADV_DONTFORK, MADV_DOFORK, 5100, fork, expect_hole);
}

// The kernel reports a hole in the range, and follows the advice around it.
static void guard_beside_a_hole(struct area *kept, struct numbers *numbers) {
    uint64_t pages = kept->pages;
    unsigned char *at = map_pages(pages + 1);
    struct area guarded = area_over("guard", at + PAGE_BYTES, pages);
    modify_and_verify(&guarded, numbers);
    modify_and_verify(kept, numbers);
    if (munmap(at, PAGE_BYTES) != 0) die("munmap");
    if (madvise(at, (pages + 1) * PAGE_BYTES, MADV_GUARD_INSTALL) == 0 || errno != ENOMEM)
        fail("guard", "a hole was not reported");
    modify_and_verify(kept, numbers);
    advise(&guarded, MADV_GUARD_REMOVE, 0);
    expect_empty(&guarded);
    area_free(&guarded);
}

// The kernel installs guards up to memory that is locked, and reports an error: what comes before
// is empty, and what comes after is as it was.
static void guard_up_to_locked_memory(struct area *kept, struct numbers *numbers, bool by_ranges) {
    uint64_t pages = kept->pages / 2;
    unsigned char *at = map_pages(2 * pages + 1);
    unsigned char *locked = at + pages * PAGE_BYTES, *after = locked + PAGE_BYTES;
    struct area guarded = area_over("guard", at, pages), intact = area_over("guard", after, pages);
    modify_and_verify(&guarded, numbers);
    modify_and_verify(&intact, numbers);
    if (mlock(locked, PAGE_BYTES) != 0) die("mlock");
    modify_and_verify(kept, numbers);
    if (by_ranges) {
        struct iovec ranges[] = {{at, pages * PAGE_BYTES}, {locked, PAGE_BYTES}, {after, pages * PAGE_BYTES}};
        int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
        long done = syscall(SYS_process_madvise, own, ranges, 3, MADV_GUARD_INSTALL, 0);
        if (done != (long)(pages * PAGE_BYTES)) fail("guard", "guards ended at another place");
        close(own);
    } else {
        if (madvise(at, (2 * pages + 1) * PAGE_BYTES, MADV_GUARD_INSTALL) == 0 || errno != EINVAL)
            fail("guard", "locked memory was not reported");
    }
    modify_and_verify(kept, numbers);
    verify_all(&intact);
    advise(&guarded, MADV_GUARD_REMOVE, 0);
    expect_empty(&guarded);
    modify_and_verify(&intact, numbers);
    if (munlock(locked, PAGE_BYTES) != 0) die("munlock");
    area_free(&intact);
    area_free(&guarded);
}

// Ranges that the kernel cannot read are an error, and nothing else.
static void guard_unreadable_ranges(void) {
    int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
    void *nowhere = (void *)8;
    if (syscall(SYS_process_madvise, own, nowhere, 1, MADV_GUARD_INSTALL, 0) != -1 || errno != EFAULT)
        fail("guard", "unreadable ranges were not reported");
    struct iovec range = {nowhere, PAGE_BYTES};
    if (syscall(SYS_process_madvise, own, &range, 1 << 20, MADV_GUARD_INSTALL, 0) != -1 || errno != EINVAL)
        fail("guard", "too many ranges were not reported");
    close(own);
}

void test_guard(void) {
    struct numbers numbers = numbers_new(5200);
    struct area kept = area_half("guard");
    guard_beside_a_hole(&kept, &numbers);
    guard_up_to_locked_memory(&kept, &numbers, false);
    guard_up_to_locked_memory(&kept, &numbers, true);
    guard_unreadable_ranges();
    struct area guarded = area_half("guard");
    for (unsigned round = 0; round < options.rounds * 2; round++) {
        modify_and_verify(&guarded, &numbers);
        modify_and_verify(&kept, &numbers);
        advise(&guarded, MADV_GUARD_INSTALL, round);
        modify_and_verify(&kept, &numbers);
        advise(&guarded, MADV_GUARD_REMOVE, round);
        expect_empty(&guarded);
    }
    area_free(&guarded);
    finish(&kept);
}

void test_shm_remap(void) {
    struct numbers numbers = numbers_new(5300);
    struct area kept = area_half("shm-remap"), replaced = area_half("shm-remap");
    int segment = shmget(IPC_PRIVATE, replaced.pages * PAGE_BYTES, IPC_CREAT | 0600);
    if (segment < 0) die("shmget");
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_and_verify(&replaced, &numbers);
        modify_and_verify(&kept, &numbers);
        if (shmat(segment, replaced.at, SHM_REMAP) != (void *)replaced.at) die("shmat");
        replaced.at[0] = 1;
        modify_and_verify(&kept, &numbers);
        if (shmdt(replaced.at) != 0) die("shmdt");
        map_anew(&replaced);
        expect_empty(&replaced);
    }
    if (shmctl(segment, IPC_RMID, NULL) != 0) die("shmctl");
    area_free(&replaced);
    finish(&kept);
}
