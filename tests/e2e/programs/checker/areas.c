// Threads on one large area: plain use, and parts of it dropped or mapped anew while others work
// next to them.
#include "content.h"
#include "tests.h"
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { BLOCK_PAGES = 64 };

static struct area shared;

// ---- pages: every thread has every Nth page -----------------------------------------------------

static void pages_work(unsigned number) {
    struct numbers numbers = numbers_new(number);
    uint64_t own = (shared.pages - number + options.threads - 1) / options.threads;
    for (uint64_t i = 0; i < own; i++) write_page(&shared, number + i * options.threads, 1);
    for (uint64_t step = 0; step < own * options.rounds; step++) {
        uint64_t page = number + next_below(&numbers, own) * options.threads;
        if (next_below(&numbers, 2) == 0)
            verify_page(&shared, page);
        else
            modify_page(&shared, page, &numbers);
    }
}

void test_pages(void) {
    shared = area_new("pages", options.bytes / PAGE_BYTES);
    verify_all(&shared);
    on_threads(pages_work);
    verify_all(&shared);
    say(shared.test, shared.pages, digest(&shared));
    area_free(&shared);
}

// ---- madvise: every thread has every Nth block of pages -----------------------------------------

static void advise(uint64_t page, uint64_t pages, int advice) {
    if (madvise(shared.at + page * PAGE_BYTES, pages * PAGE_BYTES, advice) != 0) die("madvise");
}

static void drop_half(uint64_t block, struct numbers *numbers) {
    uint64_t first = block + next_below(numbers, BLOCK_PAGES / 2), pages = BLOCK_PAGES / 2;
    advise(first, pages, MADV_DONTNEED);
    // Zero when read, and zero around a word that is written first.
    expect_zero(&shared, first, pages / 2);
    for (uint64_t page = first + pages / 2; page < first + pages; page++) {
        shared.versions[page] = 0;
        modify_page(&shared, page, numbers);
    }
}

// After MADV_FREE a page is as it was, or zero: at any time until it is written, and never half of
// each. The kernel may take it between two reads, so a page that shows a zero must be zero from
// then on.
static void verify_freed(uint64_t page) {
    const volatile uint64_t *words = page_words(&shared, page);
    for (unsigned word = 0; word < PAGE_WORDS; word++) {
        uint64_t found = words[word], expected = content_word(shared.first + page, shared.versions[page],
            word);
        if (found == expected) continue;
        if (found != 0) fail_at("madvise free", page, page_words(&shared, page) + word, found, expected);
        expect_zero(&shared, page, 1);
        return;
    }
}

static void free_quarter(uint64_t block, struct numbers *numbers) {
    uint64_t first = block + next_below(numbers, BLOCK_PAGES * 3 / 4), pages = BLOCK_PAGES / 4;
    advise(first, pages, MADV_FREE);
    for (uint64_t page = first; page < first + pages; page++) {
        uint32_t version = shared.versions[page];
        verify_freed(page);
        // The version goes on from the old one, zeroed or not: the digest must not tell which it
        // was.
        write_page(&shared, page, version + 1);
    }
}

static void madvise_work(unsigned number) {
    struct numbers numbers = numbers_new(100 + number);
    uint64_t blocks = shared.pages / BLOCK_PAGES;
    for (unsigned round = 0; round <= options.rounds; round++) {
        for (uint64_t index = number; index < blocks; index += options.threads) {
            uint64_t block = index * BLOCK_PAGES;
            for (uint64_t page = block; page < block + BLOCK_PAGES; page++) modify_page(&shared, page,
                &numbers);
            switch (next_below(&numbers, 3)) {
            case 0: drop_half(block, &numbers); break;
            case 1: free_quarter(block, &numbers); break;
            default: break;
            }
        }
        for (uint64_t index = number; index < blocks; index += options.threads)
            for (uint64_t page = 0; page < BLOCK_PAGES; page++) verify_page(&shared,
                index * BLOCK_PAGES + page);
    }
}

void test_madvise(void) {
    shared = area_new("madvise", options.bytes / PAGE_BYTES / BLOCK_PAGES * BLOCK_PAGES);
    on_threads(madvise_work);
    verify_all(&shared);
    say(shared.test, shared.pages, digest(&shared));
    area_free(&shared);
}

// ---- sparse: of eight pages, one at random stays; what is left is verified when somebody says so 

enum { SPARSE_OF = 8 };

static void wait_for_signal(void) {
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR1);
    int received;
    if (sigwait(&wanted, &received) != 0) die("sigwait");
}

void test_sparse(void) {
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGUSR1);
    if (sigprocmask(SIG_BLOCK, &held, NULL) != 0) die("sigprocmask");
    shared = area_new("sparse", options.bytes / PAGE_BYTES / SPARSE_OF * SPARSE_OF);
    struct numbers numbers = numbers_new(0);
    for (uint64_t page = 0; page < shared.pages; page++) write_page(&shared, page, 1);
    for (uint64_t first = 0; first < shared.pages; first += SPARSE_OF) {
        uint64_t stays = next_below(&numbers, SPARSE_OF);
        if (stays > 0) advise(first, stays, MADV_DONTNEED);
        if (stays + 1 < SPARSE_OF) advise(first + stays + 1, SPARSE_OF - stays - 1, MADV_DONTNEED);
        for (uint64_t page = first; page < first + SPARSE_OF; page++)
            if (page != first + stays) shared.versions[page] = 0;
    }
    wait_for_signal();
    verify_all(&shared);
    say(shared.test, shared.pages, digest(&shared));
    area_free(&shared);
}

// ---- remap: half of the area stays, and thread by thread the other half is mapped anew ----------

enum { REMAP_PAGES = 256 };

static void renew(struct area *own, unsigned turn) {
    uint64_t bytes = own->pages * PAGE_BYTES;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (turn % 2 == 0) {
        // Another thread's mapping may come first: then the area is somewhere else, which is right,
        // too.
        if (munmap(own->at, bytes) != 0) die("munmap");
    } else {
        flags |= MAP_FIXED;
    }
    void *at = mmap(own->at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at == MAP_FAILED) die("mmap at the same place");
    own->at = at;
}

static uint64_t remap_digests[64];

static void remap_work(unsigned number) {
    struct numbers numbers = numbers_new(200 + number);
    struct area own = area_new("remap", REMAP_PAGES);
    own.first = (uint64_t)(number + 1) << 32;
    uint64_t blocks = shared.pages / options.threads, turns = options.rounds * 64;
    for (unsigned turn = 0; turn < turns; turn++) {
        for (uint64_t page = 0; page < own.pages; page++) modify_page(&own, page, &numbers);
        for (unsigned i = 0; i < REMAP_PAGES; i++) // The area next door, for memory pressure.
            modify_page(&shared, number + next_below(&numbers, blocks) * options.threads, &numbers);
        verify_all(&own);
        renew(&own, turn);
        // The old area's end may be heard of late: new pages must hold from the first write on.
        uint64_t zero = next_below(&numbers, own.pages);
        expect_zero(&own, 0, zero);
        for (uint64_t page = zero; page < own.pages; page++) {
            own.versions[page] = 0;
            modify_page(&own, page, &numbers);
        }
        verify_all(&own);
    }
    remap_digests[number] = digest(&own);
    area_free(&own);
}

void test_remap(void) {
    shared = area_new("remap", options.bytes / PAGE_BYTES);
    for (uint64_t page = 0; page < shared.pages; page++) write_page(&shared, page, 1);
    on_threads(remap_work);
    verify_all(&shared);
    uint64_t sum = digest(&shared);
    for (unsigned i = 0; i < options.threads; i++) sum += remap_digests[i];
    say(shared.test, shared.pages, sum);
    area_free(&shared);
}
