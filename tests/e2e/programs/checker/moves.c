// Areas that grow, move and shrink: mremap in its forms, and the program break.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

// Gives the area `pages` pages; what it has gained must be zero.
static void resize(struct area *area, uint64_t pages, void *fixed) {
    uint64_t old_pages = area->pages;
    void *at = fixed != NULL
                   ? mremap(area->at, old_pages * PAGE_BYTES, pages * PAGE_BYTES,
                       MREMAP_MAYMOVE | MREMAP_FIXED, fixed)
                   : mremap(area->at, old_pages * PAGE_BYTES, pages * PAGE_BYTES, MREMAP_MAYMOVE);
    if (at == MAP_FAILED) die("mremap");
    area->at = at;
    area->pages = pages;
    area->versions = realloc(area->versions, pages * sizeof *area->versions);
    if (area->versions == NULL) die("realloc of the versions");
    if (pages > old_pages) expect_zero(area, old_pages, pages - old_pages);
}

// Moves pages out of the middle and back. Between the two the hole must not be touched, and the
// rest stays.
static void move_middle(struct area *area) {
    uint64_t pages = area->pages / 3, bytes = pages * PAGE_BYTES;
    unsigned char *middle = area->at + pages * PAGE_BYTES, *aside = map_pages(pages);
    if (mremap(middle, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, aside) == MAP_FAILED) die("mremap aside");
    struct area moved = *area;
    moved.at = aside;
    moved.pages = pages;
    moved.first = area->first + pages;
    moved.versions = area->versions + pages;
    verify_all(&moved);
    for (uint64_t page = 0; page < pages; page++) verify_page(area, page);
    if (mremap(aside, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, middle) == MAP_FAILED) die("mremap back");
    verify_all(area);
}

void test_mremap(void) {
    struct numbers numbers = numbers_new(300);
    uint64_t pages = options.bytes / PAGE_BYTES / 2;
    struct area area = area_new("mremap", pages / 2);
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_all(&area, &numbers);
        // A page behind the area, so that growing must move it.
        mmap(area.at + area.pages * PAGE_BYTES, PAGE_BYTES, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        resize(&area, pages, NULL);
        verify_all(&area);
        modify_all(&area, &numbers);
        resize(&area, pages, map_pages(pages));
        verify_all(&area);
        move_middle(&area);
        resize(&area, pages / 2, NULL);
        verify_all(&area);
        // What was cut off must not come back when the area grows again.
        resize(&area, pages * 3 / 4, NULL);
        modify_all(&area, &numbers);
        resize(&area, pages / 2, NULL);
        verify_all(&area);
    }
    say(area.test, area.pages, digest(&area));
    area_free(&area);
}

// A mapping grows in place in small steps, is dropped, and grows at the same place again: it must
// stay one mapping, whenever it is registered.
void test_grow(void) {
    const uint64_t step = 16, pages = options.bytes / PAGE_BYTES / 2;
    struct numbers numbers = numbers_new(350);
    unsigned char *place = map_pages(pages);
    struct area area;
    for (unsigned round = 0; round < 16; round++) {
        if (munmap(place, pages * PAGE_BYTES) != 0) die("munmap");
        area = area_over("grow", place, pages);
        area.pages = step;
        if (mmap(place, step * PAGE_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
            die("mmap");
        while (area.pages < pages) {
            struct area end = area;
            end.at += (area.pages - step) * PAGE_BYTES;
            end.first += area.pages - step;
            end.versions += area.pages - step;
            end.pages = step;
            modify_all(&end, &numbers);
            if (mremap(place, area.pages * PAGE_BYTES, (area.pages + step) * PAGE_BYTES, 0) == MAP_FAILED)
                die("mremap in place");
            area.pages += step;
        }
        modify_all(&area, &numbers);
        verify_all(&area);
        if (round < 15) free(area.versions);
    }
    say(area.test, area.pages, digest(&area));
    area_free(&area);
}

static void map_at(unsigned char *at, uint64_t pages) {
    if (mmap(at, pages * PAGE_BYTES, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        die("mmap");
}

// Mappings made side by side are one, also if one is paged and the other is new: they grow, move
// and shrink as one.
void test_joined(void) {
    struct numbers numbers = numbers_new(360);
    struct area kept = area_half("joined");
    uint64_t pages = kept.pages / 2;
    for (unsigned round = 0; round < options.rounds + 1; round++) {
        unsigned char *place = map_pages(pages);
        struct area area = area_over("joined", place, pages / 2);
        modify_and_verify(&area, &numbers);
        modify_and_verify(&kept, &numbers);
        map_at(place + area.pages * PAGE_BYTES, pages - area.pages);
        area.pages = pages;
        area.versions = realloc(area.versions, pages * sizeof *area.versions);
        if (area.versions == NULL) die("realloc of the versions");
        expect_zero(&area, pages / 2, pages / 2);
        // A part in the middle is new, too.
        map_at(place + 32 * PAGE_BYTES, 64);
        expect_zero(&area, 32, 64);
        switch (round % 3) {
        case 0: resize(&area, pages + 16, NULL); break;
        case 1: resize(&area, pages, map_pages(pages)); break;
        case 2: resize(&area, pages - 16, map_pages(pages)); break;
        }
        modify_and_verify(&area, &numbers);
        area_free(&area);
    }
    say(kept.test, kept.pages, digest(&kept));
    area_free(&kept);
}

// Since Linux 6.17 mappings with different rights, and gaps between them, move in one call.
void test_move_several(void) {
    struct numbers numbers = numbers_new(370);
    struct area area = area_half("move-several");
    uint64_t bytes = area.pages * PAGE_BYTES, moves = 0;
    for (unsigned round = 0; round < options.rounds + 1; round++) {
        modify_and_verify(&area, &numbers);
        unsigned char *third = area.at + area.pages / 3 * PAGE_BYTES, *to = map_pages(area.pages);
        if (mprotect(third, 64 * PAGE_BYTES, PROT_READ) != 0) die("mprotect");
        if (munmap(third + 128 * PAGE_BYTES, 64 * PAGE_BYTES) != 0) die("munmap");
        void *at = mremap(area.at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        if (at == MAP_FAILED && errno != EFAULT) die("mremap of several mappings");
        if (at != MAP_FAILED) {
            if (munmap(area.at, bytes) != 0) die("munmap");
            area.at = at;
            moves++;
        }
        third = area.at + area.pages / 3 * PAGE_BYTES;
        if (mprotect(third, 64 * PAGE_BYTES, PROT_READ | PROT_WRITE) != 0) die("mprotect");
        map_at(third + 128 * PAGE_BYTES, 64);
        expect_zero(&area, area.pages / 3 + 128, 64);
        verify_all(&area);
        if (at == MAP_FAILED && munmap(to, bytes) != 0) die("munmap");
    }
    say(area.test, moves, digest(&area));
    area_free(&area);
}

// With MREMAP_DONTUNMAP the pages move, and the old place stays mapped and empty.
void test_dontunmap(void) {
    struct numbers numbers = numbers_new(400);
    struct area area = area_new("dontunmap", options.bytes / PAGE_BYTES / 2);
    uint64_t bytes = area.pages * PAGE_BYTES;
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_all(&area, &numbers);
        struct area left = area_over("dontunmap", area.at, area.pages);
        void *at = mremap(area.at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        if (at == MAP_FAILED) die("mremap with MREMAP_DONTUNMAP (Linux 5.7 or newer)");
        area.at = at;
        for (uint64_t page = 0; page < left.pages; page += 2) verify_page(&left, page);
        modify_all(&left, &numbers);
        verify_all(&area);
        verify_all(&left);
        area_free(&left);
    }
    say(area.test, area.pages, digest(&area));
    area_free(&area);
}

// The break is malloc's, too: between growing and shrinking nothing here allocates, and what is
// allocated before stays below.
void test_brk(void) {
    struct numbers numbers = numbers_new(500);
    uint64_t pages = options.bytes / PAGE_BYTES / 4, half = pages / 2;
    uint32_t *versions = calloc(pages, sizeof *versions);
    if (versions == NULL) die("calloc of the versions");
    uintptr_t now = (uintptr_t)sbrk(0);
    if (sbrk((intptr_t)(-now % PAGE_BYTES)) == (void *)-1) die("sbrk to a whole page");
    uint64_t sum = 0;
    for (unsigned round = 0; round < options.rounds; round++) {
        struct area area = {.at = sbrk(0), .versions = versions, .test = "brk"};
        for (unsigned step = 1; step <= 8; step++) { // In steps, as malloc grows it.
            if (sbrk((intptr_t)(pages / 8 * PAGE_BYTES)) == (void *)-1) die("sbrk");
            uint64_t old_pages = area.pages;
            area.pages = pages / 8 * step;
            expect_zero(&area, old_pages, (area.pages - old_pages) / 2);
            for (uint64_t page = old_pages; page < area.pages; page++) modify_page(&area, page, &numbers);
        }
        verify_all(&area);
        sum += digest(&area);
        uint64_t cut = area.pages - half;
        if (sbrk(-(intptr_t)(cut * PAGE_BYTES)) == (void *)-1) die("sbrk down");
        area.pages = half;
        verify_all(&area);
        if (sbrk((intptr_t)(cut * PAGE_BYTES)) == (void *)-1) die("sbrk up again");
        area.pages = half + cut;
        expect_zero(&area, half, cut);
        verify_all(&area);
        if (sbrk(-(intptr_t)(area.pages * PAGE_BYTES)) == (void *)-1) die("sbrk to the start");
        memset(versions, 0, pages * sizeof *versions);
    }
    free(versions);
    say("brk", pages, sum);
}
