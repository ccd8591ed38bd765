// What every page of the checker holds, and what it says when a page holds something else.
//
// A page's content is derived from its index and version. Version 0 is all zero, as fresh memory
// is; of the other versions one in eight is all zero, too, because pagers treat such pages in their
// own way.
#ifndef CHECKER_CONTENT_H
#define CHECKER_CONTENT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PAGE_BYTES = 4096, PAGE_WORDS = PAGE_BYTES / 8 };

struct options {
    uint64_t bytes, seed;
    unsigned threads, rounds;
};

extern struct options options;

// A small generator of numbers: the same seed gives the same run.
struct numbers {
    uint64_t state;
};

uint64_t mix64(uint64_t x);
struct numbers numbers_new(uint64_t stream);
uint64_t next_number(struct numbers *numbers);
uint64_t next_below(struct numbers *numbers, uint64_t bound);

// An area of pages, each with the version that it ought to have. Index `first + i` is page i's: it
// stays with the content when the area moves.
struct area {
    unsigned char *at;
    uint64_t pages, first;
    uint32_t *versions;
    const char *test;
};

struct area area_new(const char *test, uint64_t pages);
// An area of half of the memory that the tests may use.
struct area area_half(const char *test);
// The same for memory that is there already; all its pages must be zero.
struct area area_over(const char *test, void *at, uint64_t pages);
void area_free(struct area *area);
unsigned char *map_pages(uint64_t pages);
uint64_t *page_words(const struct area *area, uint64_t page);

uint64_t content_word(uint64_t index, uint32_t version, unsigned word);
void write_page(struct area *area, uint64_t page, uint32_t version);
void verify_page(const struct area *area, uint64_t page);
void verify_all(const struct area *area);
// Writes one word of the new version without having looked, then verifies all others, then writes
// them. A pager that answers the first write with an empty page is found out.
void modify_page(struct area *area, uint64_t page, struct numbers *numbers);
void modify_all(struct area *area, struct numbers *numbers);
void modify_and_verify(struct area *area, struct numbers *numbers);
// Marks pages as zero, after something that must have made them so, and verifies it.
void expect_zero(struct area *area, uint64_t page, uint64_t pages);
uint64_t digest(const struct area *area);

void say(const char *test, uint64_t pages, uint64_t sum);
// Says what the area holds, and frees it.
void finish(struct area *area);
// Ends the program with status 1, naming the first wrong word.
_Noreturn void fail_at(const char *test, uint64_t page, const void *at, uint64_t found, uint64_t expected);
// Ends the program with status 1 for anything else that is wrong.
_Noreturn void fail(const char *test, const char *what);
// Ends the program with status 2: the system refused what the test needs.
_Noreturn void die(const char *what);

#endif
