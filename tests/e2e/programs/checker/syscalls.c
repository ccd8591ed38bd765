// Memory that the kernel reads and writes for the program: files, with and without the page cache,
// and pipes. Each part walks over the whole area first, so that the pages it then names may be
// anywhere.
#include "content.h"
#include "tests.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PIECE_PAGES = 64, PIECE_BYTES = PIECE_PAGES * PAGE_BYTES };

static struct area from, to;

static int open_scratch(void) {
    const char *folder = getenv("TMPDIR");
    char path[4096];
    size_t length = strlen(folder == NULL ? "/tmp" : folder);
    if (length > sizeof path - 32) fail("syscalls", "TMPDIR is too long");
    strcpy(path, folder == NULL ? "/tmp" : folder);
    strcpy(path + length, "/checker-XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0) die("mkstemp in TMPDIR");
    unlink(path);
    return fd;
}

// Both sides of a transfer must end as `from` is.
static void verify_copy(void) {
    memcpy(to.versions, from.versions, from.pages * sizeof *from.versions);
    verify_all(&to);
    verify_all(&from);
}

static void change(struct numbers *numbers) {
    for (uint64_t page = 0; page < from.pages; page++) modify_page(&from, page, numbers);
}

static void write_file(int fd) {
    for (uint64_t page = 0; page < from.pages; page += PIECE_PAGES)
        if (pwrite(fd, from.at + page * PAGE_BYTES, PIECE_BYTES, (off_t)(page * PAGE_BYTES)) != PIECE_BYTES)
            die("pwrite of a piece");
}

static void read_file(int fd) {
    for (uint64_t page = 0; page < to.pages; page += PIECE_PAGES)
        if (pread(fd, to.at + page * PAGE_BYTES, PIECE_BYTES, (off_t)(page * PAGE_BYTES)) != PIECE_BYTES)
            die("pread of a piece");
}

// Every other page of a piece at a time: many small ranges in one call.
static void read_scattered(int fd) {
    struct iovec pieces[PIECE_PAGES];
    for (uint64_t page = 0; page < to.pages; page += PIECE_PAGES) {
        for (unsigned i = 0; i < PIECE_PAGES; i++) {
            unsigned place = i < PIECE_PAGES / 2 ? 2 * i : 2 * (i - PIECE_PAGES / 2) + 1;
            pieces[place] = (struct iovec){to.at + (page + place) * PAGE_BYTES, PAGE_BYTES};
        }
        if (preadv(fd, pieces, PIECE_PAGES, (off_t)(page * PAGE_BYTES)) != PIECE_BYTES) {
            die("preadv of a piece");
        }
    }
}

// Straight from the disk into the pages, where the file system can; else it is a plain read again.
static void read_direct(int fd) {
    if (fsync(fd) != 0) die("fsync");
    int flags = fcntl(fd, F_GETFL);
    bool direct = fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
    for (uint64_t page = 0; page < to.pages; page += PIECE_PAGES) {
        ssize_t got = pread(fd, to.at + page * PAGE_BYTES, PIECE_BYTES, (off_t)(page * PAGE_BYTES));
        if (got < 0 && errno == EINVAL && direct) {
            direct = false;
            fcntl(fd, F_SETFL, flags);
            page -= PIECE_PAGES; // Once more, without.
        } else if (got != PIECE_BYTES) {
            die("direct pread of a piece");
        }
    }
    fcntl(fd, F_SETFL, flags);
}

// ---- pipe ---------------------------------------------------------------------------------------

static void *feed(void *argument) {
    int fd = *(int *)argument;
    uint64_t bytes = from.pages * PAGE_BYTES;
    for (uint64_t done = 0; done < bytes;) {
        ssize_t put = write(fd, from.at + done, bytes - done);
        if (put <= 0) die("write to the pipe");
        done += (uint64_t)put;
    }
    close(fd);
    return NULL;
}

static void through_pipe(void) {
    int ends[2];
    pthread_t feeder;
    if (pipe(ends) != 0) die("pipe");
    if (pthread_create(&feeder, NULL, feed, &ends[1]) != 0) die("pthread_create");
    uint64_t bytes = to.pages * PAGE_BYTES, done = 0;
    for (ssize_t got; (got = read(ends[0], to.at + done, bytes - done)) > 0;) done += (uint64_t)got;
    if (done != bytes) fail("syscalls", "the pipe ended early");
    pthread_join(feeder, NULL);
    close(ends[0]);
}

void test_syscalls(void) {
    struct numbers numbers = numbers_new(1300);
    uint64_t pages = options.bytes / PAGE_BYTES / 2 / PIECE_PAGES * PIECE_PAGES;
    from = area_new("syscalls", pages);
    to = area_new("syscalls", pages);
    int fd = open_scratch();
    for (unsigned round = 0; round < options.rounds; round++) {
        void (*const ways[])(int) = {read_file, read_scattered, read_direct};
        for (unsigned way = 0; way < 3; way++) {
            change(&numbers);
            write_file(fd);
            ways[way](fd);
            verify_copy();
        }
        change(&numbers);
        through_pipe();
        verify_copy();
    }
    close(fd);
    say("syscalls", pages, digest(&to));
    area_free(&from);
    area_free(&to);
}
