// Grows in steps, so that its limit can be judged without a race between its growth and the agent's
// looks at it.
//
// After each step it writes the line "grown" and waits for a line. Then it checks and changes all
// its pages, which makes nothing resident that the agent does not know, writes "checked", and waits
// for a line again.
#include "content.h"
#include "tests.h"
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 6 };

static struct area shared;

static void say_and_wait(const char *what) {
    char line[16];
    printf("%s\n", what);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL) die("a line was to come on stdin");
}

static void rework_part(unsigned number) {
    struct numbers numbers = numbers_new(number);
    for (uint64_t page = number; page < shared.pages; page += options.threads) modify_page(&shared, page,
        &numbers);
}

static void rework(void) {
    for (unsigned round = 0; round < options.rounds; round++) on_threads(rework_part);
    verify_all(&shared);
}

void test_steps(void) {
    uint64_t pages = options.bytes / PAGE_BYTES;
    void *at = aligned_alloc(PAGE_BYTES, pages * PAGE_BYTES);
    if (at == NULL) die("aligned_alloc");
    shared = area_over("steps", at, pages);
    for (unsigned step = 1; step <= STEPS; step++) {
        shared.pages = pages * step / STEPS;
        for (uint64_t page = pages * (step - 1) / STEPS; page < shared.pages; page++) write_page(&shared,
            page, 1);
        say_and_wait("grown");
        rework();
        say_and_wait("checked");
    }
}
