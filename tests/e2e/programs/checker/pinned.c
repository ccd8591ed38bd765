// Pages that a pager cannot take, or not in the usual way: protected against writing or all access,
// locked into memory, and registered with io_uring, whose reads arrive in the very frames that were
// registered.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// ---- protect: a write barrier, as garbage collectors have it ------------------------------------

enum { CARD_PAGES = 16 };

static struct area guarded;
static volatile sig_atomic_t barriers;

static void on_segv(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    uint64_t offset = (uint64_t)((unsigned char *)info->si_addr - guarded.at),
        card_bytes = CARD_PAGES * PAGE_BYTES;
    if (offset >= guarded.pages * PAGE_BYTES) fail("protect", "a fault outside of what is protected");
    if (mprotect(guarded.at + offset / card_bytes * card_bytes, card_bytes, PROT_READ | PROT_WRITE) != 0)
        fail("protect", "mprotect in the handler");
    barriers++;
}

static void protect_all(int protection) {
    if (mprotect(guarded.at, guarded.pages * PAGE_BYTES, protection) != 0) die("mprotect");
}

void test_protect(void) {
    struct numbers numbers = numbers_new(1400);
    uint64_t pages = options.bytes / PAGE_BYTES / 2 / CARD_PAGES * CARD_PAGES;
    struct area other = area_new("protect", pages);
    struct sigaction action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_ONSTACK}, former;
    stack_t stack = {.ss_size = 64 << 10, .ss_sp = malloc(64 << 10)}, former_stack;
    if (stack.ss_sp == NULL || sigaltstack(&stack, &former_stack) != 0) die("sigaltstack");
    if (sigaction(SIGSEGV, &action, &former) != 0) die("sigaction");
    guarded = area_new("protect", pages);
    modify_all(&guarded, &numbers);
    long expected = 0;
    for (unsigned round = 0; round < options.rounds; round++) {
        protect_all(round % 2 == 0 ? PROT_READ : PROT_NONE);
        modify_all(&other, &numbers); // Something else needs the room meanwhile.
        if (round % 2 == 0) verify_all(&guarded);
        for (uint64_t card = 0; card < pages; card += CARD_PAGES) {
            if (next_below(&numbers, 4) == 0) continue; // Stays protected.
            modify_page(&guarded, card + next_below(&numbers, CARD_PAGES), &numbers);
            expected++;
        }
        protect_all(PROT_READ | PROT_WRITE);
        verify_all(&guarded);
        verify_all(&other);
    }
    if (barriers != expected) fail("protect", "the write barrier was not called once for each write");
    sigaction(SIGSEGV, &former, NULL);
    sigaltstack(&former_stack, NULL);
    free(stack.ss_sp);
    say("protect", pages, digest(&guarded) + digest(&other));
    area_free(&guarded);
    area_free(&other);
}

// ---- pinned: locked pages, and pages registered with io_uring -----------------------------------

enum { PINNED_PAGES = 16, RING_ENTRIES = 4 };

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
};

static void *map_ring(int fd, size_t bytes, off_t what) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (at == MAP_FAILED) die("mmap of an io_uring");
    return at;
}

// False where io_uring is not there, or forbidden.
static bool ring_open(struct ring *ring) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    ring->fd = (int)syscall(SYS_io_uring_setup, RING_ENTRIES, &p);
    if (ring->fd < 0) return false;
    unsigned char *sq = map_ring(ring->fd, p.sq_off.array + p.sq_entries * sizeof(unsigned),
        IORING_OFF_SQ_RING);
    unsigned char *cq =
        map_ring(ring->fd, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring->entries = map_ring(ring->fd, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring->sq_tail = (void *)(sq + p.sq_off.tail);
    ring->sq_mask = (void *)(sq + p.sq_off.ring_mask);
    ring->sq_array = (void *)(sq + p.sq_off.array);
    ring->cq_head = (void *)(cq + p.cq_off.head);
    ring->cq_tail = (void *)(cq + p.cq_off.tail);
    ring->cq_mask = (void *)(cq + p.cq_off.ring_mask);
    ring->completions = (void *)(cq + p.cq_off.cqes);
    return true;
}

// One read into the registered buffer, waited for; returns what it got.
static int ring_read(struct ring *ring, int file, void *to, unsigned bytes, uint64_t offset) {
    unsigned tail = *ring->sq_tail, slot = tail & *ring->sq_mask;
    ring->entries[slot] = (struct io_uring_sqe){.opcode = IORING_OP_READ_FIXED, .fd = file, .off = offset,
                                                .addr = (uint64_t)(uintptr_t)to, .len = bytes,
                                                    .buf_index = 0};
    ring->sq_array[slot] = slot;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL,
        0) != 1) die("io_uring_enter");
    unsigned head = *ring->cq_head;
    if (__atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) == head) fail("pinned",
        "io_uring gave no completion");
    int result = ring->completions[head & *ring->cq_mask].res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

// Registered once, then read into again and again, with pressure in between: if a page lost its
// frame, the read would go where the program does not see it.
static void read_registered(struct area *pinned, struct area *pressure, struct numbers *numbers) {
    struct ring ring;
    uint64_t bytes = pinned->pages * PAGE_BYTES;
    struct iovec buffer = {pinned->at, bytes};
    FILE *file = tmpfile();
    if (file == NULL) die("tmpfile");
    bool have_ring = ring_open(&ring);
    if (have_ring && syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1) != 0)
        die("io_uring_register of the buffers");
    if (!have_ring) fputs("checker: no io_uring here; plain reads instead\n", stderr);
    struct area source = area_new("pinned source", pinned->pages);
    for (unsigned round = 0; round < options.rounds * 4; round++) {
        modify_all(&source, numbers);
        if (pwrite(fileno(file), source.at, bytes, 0) != (ssize_t)bytes) die("pwrite");
        modify_all(pressure, numbers);
        ssize_t got = have_ring ? ring_read(&ring, fileno(file), pinned->at, (unsigned)bytes, 0)
                                : pread(fileno(file), pinned->at, bytes, 0);
        if (got != (ssize_t)bytes) fail("pinned", "a read into registered pages fell short");
        memcpy(pinned->versions, source.versions, pinned->pages * sizeof *source.versions);
        verify_all(pinned);
    }
    area_free(&source);
    if (have_ring) close(ring.fd);
    fclose(file);
}

void test_pinned(void) {
    struct numbers numbers = numbers_new(1500);
    struct area pressure = area_new("pinned", options.bytes / PAGE_BYTES / 2);
    struct area pinned = area_new("pinned", PINNED_PAGES);
    modify_all(&pinned, &numbers);
    read_registered(&pinned, &pressure, &numbers);

    struct area locked = area_new("pinned", PINNED_PAGES);
    modify_all(&locked, &numbers);
    // A limit on locked memory may forbid it: then this is plain memory, which must be right as
    // well.
    bool is_locked = mlock(locked.at, locked.pages * PAGE_BYTES) == 0;
    modify_all(&pressure, &numbers);
    unsigned char present[PINNED_PAGES];
    if (mincore(locked.at, locked.pages * PAGE_BYTES, present) != 0) die("mincore");
    for (unsigned page = 0; is_locked && page < PINNED_PAGES; page++)
        if ((present[page] & 1) == 0) fail("pinned", "a locked page was not in memory");
    verify_all(&locked);
    verify_all(&pressure);
    say("pinned", pressure.pages, digest(&pressure) + digest(&pinned) + digest(&locked));
    area_free(&pressure);
    area_free(&pinned);
    area_free(&locked);
}

// All memory is locked in the middle of the run, and unlocked again: what is present must stay so
// meanwhile, and all must be right.
void test_lock_all(void) {
    struct numbers numbers = numbers_new(1600);
    struct area before = area_new("lock-all", options.bytes / PAGE_BYTES / 2);
    modify_all(&before, &numbers);
    for (unsigned round = 0; round < options.rounds + 1; round++) {
        // A limit on locked memory may forbid it: then this is plain memory.
        bool is_locked = mlockall(MCL_CURRENT | MCL_ONFAULT) == 0;
        struct area after = area_new("lock-all", options.bytes / PAGE_BYTES / 2);
        modify_all(&after, &numbers);
        verify_all(&before);
        verify_all(&after);
        if (is_locked && munlockall() != 0) die("munlockall");
        modify_all(&after, &numbers);
        modify_all(&before, &numbers);
        verify_all(&after);
        area_free(&after);
    }
    verify_all(&before);
    say("lock-all", before.pages, digest(&before));
    area_free(&before);
}

// ---- protected against writes for long ----------------------------------------------------------

static volatile sig_atomic_t is_signalled;

static void note_signal(int signal) {
    (void)signal;
    is_signalled = 1;
}

// Reads its protected memory again and again, until a signal comes.
void test_read_only(void) {
    struct numbers numbers = numbers_new(6400);
    struct area area = area_half("read-only");
    struct sigaction action = {.sa_handler = note_signal};
    if (sigaction(SIGUSR1, &action, NULL) != 0) die("sigaction");
    modify_and_verify(&area, &numbers);
    uint64_t bytes = area.pages * PAGE_BYTES;
    if (mprotect(area.at, bytes, PROT_READ) != 0) die("mprotect");
    do verify_all(&area);
    while (!is_signalled);
    if (mprotect(area.at, bytes, PROT_READ | PROT_WRITE) != 0) die("mprotect");
    modify_and_verify(&area, &numbers);
    finish(&area);
}
