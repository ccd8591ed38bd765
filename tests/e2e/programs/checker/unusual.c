// What few programs do, and some must: daemons, changes of user, memory that is populated at once,
// unbuffered files, signals on a stack in the heap, mutexes that outlive their owner.
#include "content.h"
#include "tests.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/close_range.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NOBODY = 65534, PIECE_BYTES = 64 * PAGE_BYTES, STACK_BYTES = 1 << 20 };

// ---- a daemon, which closes every descriptor, ours too if it could ------------------------------

void test_daemon(void) {
    struct numbers numbers = numbers_new(3000);
    struct area area = area_half("daemon");
    modify_and_verify(&area, &numbers);
    pid_t daemon = forked();
    if (daemon == 0) {
        if (setsid() < 0 || syscall(SYS_close_range, 0, ~0u, 0) != 0) _exit(2);
        modify_and_verify(&area, &numbers);
        pid_t worker = forked();
        modify_and_verify(&area, &numbers);
        if (worker == 0) _exit(0);
        expect_end(worker, "daemon", "a child's memory was wrong");
        _exit(0);
    }
    expect_end(daemon, "daemon", "a child's memory was wrong");
    verify_all(&area);
    finish(&area);
}

// ---- a program of root's that becomes nobody's --------------------------------------------------

// No thread may keep what the program has given up.
static void verify_threads_are_nobody(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL) die("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char path[300], line[200];
        unsigned ids[4];
        int checked = 0;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *status = fopen(path, "r");
        if (status == NULL) die(path);
        while (fgets(line, sizeof line, status) != NULL) {
            if (strncmp(line, "Groups:", 7) == 0 && strspn(line + 7,
                " \t\n") != strlen(line + 7)) fail("setuid", line);
            if (sscanf(line, "Uid: %u %u %u %u", ids, ids + 1, ids + 2, ids + 3) != 4
                && sscanf(line, "Gid: %u %u %u %u", ids, ids + 1, ids + 2, ids + 3) != 4)
                continue;
            for (unsigned i = 0; i < 4; i++)
                if (ids[i] != NOBODY) fail("setuid", "a thread kept its rights");
            checked++;
        }
        if (checked != 2) fail("setuid", "a thread could not be looked at");
        fclose(status);
    }
    closedir(tasks);
}

void test_setuid(void) {
    struct numbers numbers = numbers_new(3100);
    struct area area = area_half("setuid");
    modify_and_verify(&area, &numbers);
    if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) die("setuid");
    verify_threads_are_nobody();
    modify_and_verify(&area, &numbers);
    pid_t child = forked();
    modify_and_verify(&area, &numbers);
    if (child == 0) {
        verify_threads_are_nobody();
        _exit(0);
    }
    expect_end(child, "setuid", "a child's memory was wrong");
    finish(&area);
}

// ---- populated at once, and given up again ------------------------------------------------------

void test_populate(void) {
    struct numbers numbers = numbers_new(3200);
    struct area other = area_half("populate");
    uint64_t pages = other.pages / 4;
    for (unsigned round = 0; round < options.rounds * 4; round++) {
        modify_and_verify(&other, &numbers);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
        void *at = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) die("mmap with MAP_POPULATE");
        struct area area = area_over("populate", at, pages);
        verify_all(&area);
        modify_and_verify(&area, &numbers);
        modify_and_verify(&other, &numbers);
        if (madvise(at, pages * PAGE_BYTES, MADV_POPULATE_WRITE) != 0
            && errno != EINVAL) die("MADV_POPULATE_WRITE");
        verify_all(&area);
        area_free(&area);
    }
    finish(&other);
}

// All memory in one call. Some pages are written later.
void test_populate_all(void) {
    struct numbers numbers = numbers_new(3250);
    uint64_t pages = options.bytes / PAGE_BYTES;
    for (int by_advice = 0; by_advice < 2; by_advice++) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | (by_advice ? 0 : MAP_POPULATE);
        void *at = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) die("mmap");
        if (by_advice && madvise(at, pages * PAGE_BYTES, MADV_POPULATE_WRITE) != 0) die("madvise");
        struct area area = area_over("populate-all", at, pages);
        for (uint64_t page = 0; page < pages; page += 64) modify_page(&area, page, &numbers);
        verify_all(&area);
        say(area.test, area.pages, digest(&area));
        area_free(&area);
    }
}

// ---- files without the page cache ---------------------------------------------------------------

static int open_direct(void) {
    char path[4096];
    const char *folder = getenv("TMPDIR");
    int length = snprintf(path, sizeof path, "%s/checker-XXXXXX", folder == NULL ? "/tmp" : folder);
    if (length < 0 || (size_t)length >= sizeof path) fail("direct", "TMPDIR is too long");
    int fd = mkostemp(path, O_DIRECT);
    if (fd < 0) die("a file with O_DIRECT in TMPDIR");
    unlink(path);
    return fd;
}

void test_direct(void) {
    struct numbers numbers = numbers_new(3300);
    struct area from = area_half("direct"), to = area_half("direct");
    uint64_t bytes = from.pages * PAGE_BYTES / PIECE_BYTES * PIECE_BYTES;
    int fd = open_direct();
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_and_verify(&from, &numbers);
        modify_and_verify(&to, &numbers); // `from` leaves meanwhile.
        for (uint64_t done = 0; done < bytes; done += PIECE_BYTES)
            if (pwrite(fd, from.at + done, PIECE_BYTES, (off_t)done) != PIECE_BYTES) die("a direct pwrite");
        for (uint64_t done = 0; done < bytes; done += PIECE_BYTES)
            if (pread(fd, to.at + done, PIECE_BYTES, (off_t)done) != PIECE_BYTES) die("a direct pread");
        memcpy(to.versions, from.versions, bytes / PAGE_BYTES * sizeof *to.versions);
        verify_all(&to);
        verify_all(&from);
    }
    close(fd);
    area_free(&to);
    finish(&from);
}

// ---- signals on a stack that may have left ------------------------------------------------------

static struct area interrupted;
static volatile sig_atomic_t signals;

static void on_signal(int signal) {
    (void)signal;
    verify_page(&interrupted, (uint64_t)signals % interrupted.pages);
    signals++;
}

void test_signal_stack(void) {
    struct numbers numbers = numbers_new(3400);
    interrupted = area_half("signal-stack");
    stack_t stack = {.ss_sp = map_pages(STACK_BYTES / PAGE_BYTES), .ss_size = STACK_BYTES}, former;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&stack, &former) != 0 || sigaction(SIGUSR1, &action, NULL) != 0) die("sigaltstack");
    for (unsigned round = 0; round < options.rounds * 4; round++) {
        modify_and_verify(&interrupted, &numbers);
        raise(SIGUSR1);
        if (signals != (sig_atomic_t)round + 1) fail("signal-stack",
            "the handler was not called once for each signal");
    }
    if (sigaltstack(&former, NULL) != 0) die("sigaltstack");
    finish(&interrupted);
}

// ---- a mutex whose owner ends -------------------------------------------------------------------

static pthread_mutex_t *left_locked;

static void *lock_and_end(void *argument) {
    if (pthread_mutex_lock(left_locked) != 0) fail("robust", "the mutex could not be locked");
    modify_and_verify(argument, &(struct numbers){1});
    return NULL;
}

void test_robust(void) {
    struct numbers numbers = numbers_new(3500);
    struct area pressure = area_half("robust");
    // Between processes, as such mutexes mostly are.
    left_locked = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (left_locked == MAP_FAILED) die("mmap of shared memory");
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    for (unsigned round = 0; round < options.rounds; round++) {
        pthread_t owner;
        pthread_mutex_init(left_locked, &attributes);
        if (pthread_create(&owner, NULL, lock_and_end, &pressure) != 0) die("pthread_create");
        pthread_join(owner, NULL);
        if (pthread_mutex_lock(left_locked) != EOWNERDEAD) fail("robust", "the owner's end was not told");
        if (pthread_mutex_consistent(left_locked) != 0) fail("robust", "the mutex could not be repaired");
        pthread_mutex_unlock(left_locked);
        pthread_mutex_destroy(left_locked);
        modify_and_verify(&pressure, &numbers);
    }
    finish(&pressure);
}
