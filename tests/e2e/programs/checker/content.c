#include "content.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct options options = {.bytes = 256u << 20, .seed = 1, .threads = 4, .rounds = 2};

// ---- numbers ------------------------------------------------------------------------------------

uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

struct numbers numbers_new(uint64_t stream) {
    return (struct numbers){mix64(options.seed ^ mix64(stream))};
}

uint64_t next_number(struct numbers *numbers) {
    numbers->state += 0x9E3779B97F4A7C15u;
    return mix64(numbers->state);
}

uint64_t next_below(struct numbers *numbers, uint64_t bound) {
    return next_number(numbers) % bound;
}

// ---- content ------------------------------------------------------------------------------------

// The part of the content that all words of a page share; 0 for a zero page.
static uint64_t content_base(uint64_t index, uint32_t version) {
    uint64_t base = mix64(options.seed ^ mix64(index) ^ ((uint64_t)version << 40));
    return version == 0 || base % 8 == 0 ? 0 : base;
}

static uint64_t word_of(uint64_t base, unsigned word) {
    return base == 0 ? 0 : base ^ (word * 0x9E3779B97F4A7C15u);
}

uint64_t content_word(uint64_t index, uint32_t version, unsigned word) {
    return word_of(content_base(index, version), word);
}

// ---- areas --------------------------------------------------------------------------------------

unsigned char *map_pages(uint64_t pages) {
    void *at = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) die("mmap");
    return at;
}

struct area area_over(const char *test, void *at, uint64_t pages) {
    uint32_t *versions = calloc(pages, sizeof *versions);
    if (versions == NULL) die("calloc of the versions");
    return (struct area){.at = at, .pages = pages, .versions = versions, .test = test};
}

struct area area_new(const char *test, uint64_t pages) {
    return area_over(test, map_pages(pages), pages);
}

struct area area_half(const char *test) {
    return area_new(test, options.bytes / PAGE_BYTES / 2);
}

void area_free(struct area *area) {
    if (munmap(area->at, area->pages * PAGE_BYTES) != 0) die("munmap");
    free(area->versions);
    *area = (struct area){0};
}

uint64_t *page_words(const struct area *area, uint64_t page) {
    return (uint64_t *)(void *)(area->at + page * PAGE_BYTES);
}

void write_page(struct area *area, uint64_t page, uint32_t version) {
    uint64_t base = content_base(area->first + page, version), *words = page_words(area, page);
    for (unsigned word = 0; word < PAGE_WORDS; word++) words[word] = word_of(base, word);
    area->versions[page] = version;
}

static void verify_words(const struct area *area, uint64_t page, unsigned except) {
    uint64_t base = content_base(area->first + page, area->versions[page]);
    const volatile uint64_t *words = page_words(area, page);
    for (unsigned word = 0; word < PAGE_WORDS; word++) {
        uint64_t found = words[word];
        if (found != word_of(base, word) && word != except)
            fail_at(area->test, area->first + page, page_words(area, page) + word, found, word_of(base,
                word));
    }
}

void verify_page(const struct area *area, uint64_t page) {
    verify_words(area, page, PAGE_WORDS);
}

void verify_all(const struct area *area) {
    for (uint64_t page = 0; page < area->pages; page++) verify_page(area, page);
}

void modify_page(struct area *area, uint64_t page, struct numbers *numbers) {
    uint32_t version = area->versions[page] + 1;
    unsigned first = (unsigned)next_below(numbers, PAGE_WORDS);
    volatile uint64_t *words = page_words(area, page);
    words[first] = content_word(area->first + page, version, first);
    verify_words(area, page, first);
    write_page(area, page, version);
}

void modify_all(struct area *area, struct numbers *numbers) {
    for (uint64_t page = 0; page < area->pages; page++) modify_page(area, page, numbers);
}

void modify_and_verify(struct area *area, struct numbers *numbers) {
    modify_all(area, numbers);
    verify_all(area);
}

void expect_zero(struct area *area, uint64_t page, uint64_t pages) {
    for (uint64_t end = page + pages; page < end; page++) {
        area->versions[page] = 0;
        verify_page(area, page);
    }
}

uint64_t digest(const struct area *area) {
    uint64_t sum = 0;
    for (uint64_t page = 0; page < area->pages; page++) {
        const uint64_t *words = page_words(area, page);
        uint64_t hash = area->first + page;
        for (unsigned word = 0; word < PAGE_WORDS; word++) hash = (hash ^ words[word]) * 0x100000001B3u;
        sum += mix64(hash);
    }
    return sum;
}

// ---- words to the user --------------------------------------------------------------------------

void say(const char *test, uint64_t pages, uint64_t sum) {
    printf("%s ok pages %llu digest %016llx\n", test, (unsigned long long)pages, (unsigned long long)sum);
    fflush(stdout);
}

void finish(struct area *area) {
    say(area->test, area->pages, digest(area));
    area_free(area);
}

// Straight to the descriptor and out: the memory that a buffer or an exit handler needs may be what
// is broken.
static _Noreturn void end(int status, const char *text, int length) {
    ssize_t ignored = write(STDERR_FILENO, text, (size_t)length);
    (void)ignored;
    _exit(status);
}

void fail_at(const char *test, uint64_t page, const void *at, uint64_t found, uint64_t expected) {
    char text[256];
    end(1, text, snprintf(text, sizeof text, "%s FAILED page %llu at %p: found %016llx, expected "
        "%016llx\n", test,
                          (unsigned long long)page, at, (unsigned long long)found,
                              (unsigned long long)expected));
}

void fail(const char *test, const char *what) {
    char text[256];
    end(1, text, snprintf(text, sizeof text, "%s FAILED: %s\n", test, what));
}

void die(const char *what) {
    char text[256];
    end(2, text, snprintf(text, sizeof text, "checker could not go on: %s: %s\n", what, strerror(errno)));
}
