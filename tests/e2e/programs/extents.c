/* A program with extents:
 * extents check | hold COUNT BYTES | fill BYTES | read NODE ADDR KEY BYTES | guess COUNT */
#include <aquifer.h>

#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static aquifer_session *session;

static void must(int outcome) {
    if (outcome)
        errx(1, "%s", aquifer_error());
}

static void must_be(int outcome, int wanted) {
    if (outcome != wanted)
        errx(1, "%d instead of %d: %s", outcome, wanted, outcome ? aquifer_error() : "");
}

static void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t at = 0; at < count; at++)
        bytes[at] = (unsigned char)(seed * 31 + at * 7 + at / 251);
}

static void check_sizes(void) {
    unsigned char *out = malloc(2 << 20), *in = malloc(2 << 20);
    aquifer_extent extents[10];
    for (unsigned k = 0; k < 10; k++) {
        must(aquifer_allocate(session, (4096u << k) - (k > 0), &extents[k]));
        if (extents[k].bytes != 4096u << k)
            errx(1, "%llu bytes of class %u", (unsigned long long)extents[k].bytes, k);
        fill(out, extents[k].bytes, k);
        must(aquifer_write(session, &extents[k], 0, out, extents[k].bytes));
    }
    for (unsigned k = 0; k < 10; k++) {
        fill(out, extents[k].bytes, k);
        must(aquifer_read(session, &extents[k], 0, in, extents[k].bytes));
        if (memcmp(in, out, extents[k].bytes))
            errx(1, "class %u is not what was written", k);
        must(aquifer_read(session, &extents[k], 4093, in, 3));
        if (memcmp(in, out + 4093, 3))
            errx(1, "the last bytes of the first page of class %u", k);
    }
    must(aquifer_free_many(session, extents, 10));
    must_be(aquifer_free(session, &extents[3]), -EACCES);
    must_be(aquifer_write(session, &extents[3], 1, out, extents[3].bytes), -EINVAL);
    must_be(aquifer_allocate(session, AQUIFER_EXTENT_BYTES_MAX + 1, extents), -EINVAL);
    must_be(aquifer_allocate(session, 0, extents), -EINVAL);
    must_be(aquifer_allocate(NULL, 1, extents), -EINVAL);
    must_be(aquifer_read(session, NULL, 0, in, 1), -EINVAL);
    free(out);
    free(in);
}

/* Above 2 MiB: 33 MiB less a byte are 17 sections, whose bounds are not those of the reads and
 * writes. */
static void check_large(void) {
    const size_t wanted = (33u << 20) - 1, section = 2u << 20;
    aquifer_extent extent, pair[2];
    must(aquifer_allocate(session, wanted, &extent));
    if (extent.bytes != 17 * section)
        errx(1, "%llu bytes", (unsigned long long)extent.bytes);
    unsigned char *out = malloc(extent.bytes), *in = malloc(extent.bytes);
    fill(out, extent.bytes, 3);
    must(aquifer_write(session, &extent, 1, out + 1, extent.bytes - 1));
    must(aquifer_write(session, &extent, 0, out, 1));
    must(aquifer_read(session, &extent, 0, in, extent.bytes));
    if (memcmp(in, out, extent.bytes))
        errx(1, "a large extent is not what was written");
    must(aquifer_read(session, &extent, 3 * section - 5, in, 10));
    if (memcmp(in, out + 3 * section - 5, 10))
        errx(1, "what is at the end of one section and the beginning of the next");
    must_be(aquifer_read(session, &extent, extent.bytes - 1, in, 2), -EINVAL);
    must(aquifer_allocate_many(session, 2 * section, 2, pair));
    must(aquifer_free_many(session, pair, 2));
    /* A part that was given back is closed, the others are not. */
    aquifer_extent part = {.addr = extent.addr + section, .bytes = section, .key = extent.key,
        .node = extent.node};
    must(aquifer_free(session, &part));
    must_be(aquifer_read(session, &extent, section, in, 1), -EACCES);
    must(aquifer_read(session, &extent, 2 * section, in, section));
    if (memcmp(in, out + 2 * section, section))
        errx(1, "a section beside one that was given back");
    must_be(aquifer_free(session, &extent), -EACCES);
    must_be(aquifer_read(session, &extent, 0, in, 1), -EACCES);
    free(out);
    free(in);
}

/* Several parts of several extents at once; and what the session counts. */
static void check_many(void) {
    enum { COUNT = 300, PART = 1000 };
    static unsigned char out[COUNT][PART], in[COUNT][PART];
    static aquifer_extent extents[COUNT];
    static aquifer_write_job writes[COUNT];
    static aquifer_read_job reads[COUNT];
    aquifer_statistics before, after;
    must(aquifer_get_statistics(session, &before));
    must(aquifer_allocate_many(session, 8192, COUNT, extents));
    for (unsigned at = 0; at < COUNT; at++) {
        fill(out[at], PART, at);
        writes[at] = (aquifer_write_job){extents[at], 4000 + at, out[at], PART};
        reads[at] = (aquifer_read_job){extents[at], 4000 + at, in[at], PART};
    }
    must(aquifer_write_many(session, writes, COUNT));
    must(aquifer_read_many(session, reads, COUNT));
    if (memcmp(in, out, sizeof in))
        errx(1, "many parts are not what was written");
    must(aquifer_get_statistics(session, &after));
    if (after.bytes - before.bytes != COUNT * 8192 || after.allocated - before.allocated != COUNT
        || after.freed != before.freed
        || after.read_bytes - before.read_bytes != sizeof in
            || after.written_bytes - before.written_bytes != sizeof out
        || after.requests - before.requests != 3 * COUNT)
        errx(1, "%llu bytes, %llu requests are counted", (unsigned long long)after.bytes,
            (unsigned long long)after.requests);
    reads[7].offset = 8192;
    must_be(aquifer_read_many(session, reads, COUNT), -EINVAL);
    writes[7].from = NULL;
    must_be(aquifer_write_many(session, writes, COUNT), -EINVAL);
    must_be(aquifer_read_many(session, NULL, 1), -EINVAL);
    must(aquifer_free_many(session, extents, COUNT));
    must_be(aquifer_read_many(session, reads, 1), -EACCES);
    must(aquifer_get_statistics(session, &after));
    if (after.bytes != before.bytes || after.freed - before.freed != COUNT)
        errx(1, "%llu bytes are left", (unsigned long long)after.bytes);
    must_be(aquifer_get_statistics(session, NULL), -EINVAL);
}

/* A child is no part of the session, and does it no harm. */
static void check_fork(void) {
    aquifer_extent extent;
    must(aquifer_allocate(session, 4096, &extent));
    must(aquifer_write(session, &extent, 0, "parent", 6));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        must_be(aquifer_free(session, &extent), -ECHILD);
        aquifer_close(session);
        session = aquifer_open(NULL);
        if (!session)
            errx(1, "%s", aquifer_error());
        must_be(aquifer_free(session, &extent), -EACCES);
        char bytes[6];
        must(aquifer_read(session, &extent, 0, bytes, 6));
        must_be(memcmp(bytes, "parent", 6), 0);
        must(aquifer_write(session, &extent, 0, "child!", 6));
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) < 0 || status)
        errx(1, "the child ended with %#x", status);
    char bytes[6];
    must(aquifer_read(session, &extent, 0, bytes, 6));
    must_be(memcmp(bytes, "child!", 6), 0);
    must(aquifer_free(session, &extent));
}

static void hold(size_t count, size_t bytes) {
    aquifer_extent *extents = calloc(count, sizeof *extents);
    must(aquifer_allocate_many(session, bytes, count, extents));
    printf("%u %llu %u %llu\n", extents[0].node, (unsigned long long)extents[0].addr, extents[0].key,
           (unsigned long long)extents[0].bytes);
    fflush(stdout);
    pause();
}

/* Take until there is no more; then say how much it was, and why it ended. */
static void take_all(size_t bytes) {
    aquifer_extent extent;
    unsigned long long taken = 0;
    int outcome;
    while (!(outcome = aquifer_allocate(session, bytes, &extent)))
        taken += bytes;
    printf("%llu %d\n", taken, -outcome);
    fflush(stdout);
    pause();
}

/* Tries wrong keys. Beyond the tries of a session they are refused, and no right key is. */
static void guess(unsigned count) {
    enum { TRIES_MAX = 32 };
    aquifer_extent extent;
    char byte;
    must(aquifer_allocate(session, 4096, &extent));
    aquifer_extent other = extent;
    for (unsigned at = 0; at < count; at++) {
        other.addr = extent.addr ^ 4096;
        other.key = extent.key ^ (at + 1);
        int outcome = aquifer_read(session, &other, 0, &byte, 1);
        must_be(outcome, outcome == -EAGAIN && at >= TRIES_MAX ? -EAGAIN : -EACCES);
        must(aquifer_read(session, &extent, 0, &byte, 1));
    }
}

static unsigned long long number(const char *text) {
    return strtoull(text, NULL, 0);
}

int main(int argc, char **argv) {
    session = aquifer_open(NULL);
    if (!session)
        errx(1, "%s", aquifer_error());
    if (argc == 2 && !strcmp(argv[1], "check")) {
        check_sizes();
        check_large();
        check_many();
        check_fork();
        puts("fine");
    } else if (argc == 4 && !strcmp(argv[1], "hold")) {
        hold(number(argv[2]), number(argv[3]));
    } else if (argc == 3 && !strcmp(argv[1], "fill")) {
        take_all(number(argv[2]));
    } else if (argc == 6 && !strcmp(argv[1], "read")) {
        aquifer_extent extent = {.node = (uint16_t)number(argv[2]),
                                 .addr = number(argv[3]),
                                 .key = (uint32_t)number(argv[4]),
                                 .bytes = number(argv[5])};
        char byte;
        printf("%d\n", -aquifer_read(session, &extent, 0, &byte, 1));
    } else if (argc == 3 && !strcmp(argv[1], "guess")) {
        guess((unsigned)number(argv[2]));
        puts("fine");
    } else {
        errx(2, "check | hold COUNT BYTES | fill BYTES | read NODE ADDR KEY BYTES | guess COUNT");
    }
    aquifer_close(session);
}
