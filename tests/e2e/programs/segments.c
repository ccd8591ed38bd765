/* Uses segments as a program in C does, and compares all bytes. Prints "done".
 *
 * segments home NAME PEER: hands a small and a large segment to PEER, gets them back.
 * segments peer NAME PEER: the other side of that.
 * segments give NAME PEER: hands a segment to PEER, which waits, and ends.
 * segments orphan NAME explicit|ahead: after a line of input, receives a segment whose pages do not
 * come, and touches them until one is SIGBUS or SIGSEGV.
 * segments own NAME: has a segment, and touches it until that is SIGSEGV.
 * segments synced NAME COPIES: has a segment, which it syncs, changes, reverts, and hands to the
 * process that an operator names.
 * segments lost NAME: receives that segment, and after a line of input, when the other host has
 * died, gives it up and restores it.
 * segments get NAME: waits for that segment, whose pages come only when it pulls them.
 */
#include <aquifer.h>
#include <aquifer_segments.h>

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PATIENCE_MS = 30000 };
static const size_t SIZES[] = {4 << 20, 1 << 30};

static sigjmp_buf after_fault;
static volatile sig_atomic_t signal_of_fault;

static void on_fault(int number)
{
    signal_of_fault = number;
    siglongjmp(after_fault, 1);
}

/* The signal that a touch of an address ends in; 0 if it succeeds. */
static int touch(const volatile char *address)
{
    signal_of_fault = 0;
    if (!sigsetjmp(after_fault, 1))
        (void)*address;
    return signal_of_fault;
}

static int done(int value)
{
    if (value < 0)
        errx(1, "%s", aquifer_error());
    return value;
}

static void expect(int value, int wanted, const char *what)
{
    if (value != wanted)
        errx(1, "%s: %d instead of %d: %s", what, value, wanted, aquifer_error());
}

/* The words of a segment that are checked: some of each, at distances of all sizes. */
static size_t next_place(size_t place) { return place + 1 + place / 7; }

static void fill(aquifer_segment *segment, uint64_t stamp)
{
    uint64_t *words = aquifer_segment_address(segment);
    size_t count = aquifer_segment_bytes(segment) / sizeof *words;
    for (size_t place = 0; place < count; place = next_place(place))
        words[place] = (uint64_t)&words[place] + stamp;
    /* Each page of a small one has something. */
    count = aquifer_segment_bytes(segment) == SIZES[0] ? count : 0;
    for (size_t page = 0; page < count; page += PAGE / sizeof *words)
        words[page] = (uint64_t)&words[page] + stamp;
}

static void check(aquifer_segment *segment, uint64_t stamp)
{
    const uint64_t *words = aquifer_segment_address(segment);
    size_t count = aquifer_segment_bytes(segment) / sizeof *words;
    for (size_t place = 0; place < count; place = next_place(place))
        if (words[place] != (uint64_t)&words[place] + stamp)
            errx(1, "word %zu of segment %ju is wrong", place, (uintmax_t)aquifer_segment_id(segment));
}

/* Whether a loop that began at `start` may go on. */
static int is_patient(time_t start)
{
    sched_yield();
    return time(NULL) - start < PATIENCE_MS / 1000;
}

/* Connects as soon as the peer is open. */
static void connect_to(aquifer_segment *segment, const char *peer)
{
    time_t start = time(NULL);
    while (aquifer_segment_connect(segment, peer) < 0)
        if (!is_patient(start))
            errx(1, "%s", aquifer_error());
}

/* Opens a name as soon as an earlier process of this name has closed it. */
static aquifer_process *open_name(const char *name)
{
    time_t start = time(NULL);
    aquifer_process *self;
    while (!(self = aquifer_process_open(NULL, name)))
        if (!is_patient(start))
            errx(1, "%s", aquifer_error());
    return self;
}

static aquifer_segment *receive(aquifer_process *self, int pulling)
{
    aquifer_segment *segment;
    expect(done(aquifer_segment_receive(self, pulling, PATIENCE_MS, &segment)), 1, "a segment");
    return segment;
}

/* A forked child has neither the memory nor the calls. */
static void check_child(aquifer_process *self, aquifer_segment *segment)
{
    pid_t child = fork();
    if (child < 0)
        err(1, "fork");
    if (child == 0)
    {
        if (touch(aquifer_segment_address(segment)) != SIGSEGV)
            _exit(1);
        _exit(aquifer_segment_abort(segment) == -ECHILD && aquifer_process_close(self) == -ECHILD ? 0 : 2);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0)
        errx(1, "a child has a segment of its parent: status %#x", status);
}

static void home(aquifer_process *self, const char *peer)
{
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
    {
        aquifer_segment *segment, *other;
        aquifer_segment_status status[4];
        done(aquifer_segment_allocate(self, i, SIZES[i], &segment));
        expect(aquifer_segment_allocate(self, i, SIZES[i], &other), -EACCES, "a second one of its number");
        expect(aquifer_segment_allocate(self, i + 100, 5, &other), -EACCES, "a length of 5");
        expect(aquifer_segment_connect(segment, "nobody"), -EACCES, "a peer that is not there");
        fill(segment, 1);
        check_child(self, segment);
        connect_to(segment, peer);
        done(aquifer_segment_abort(segment));
        check(segment, 1);
        expect(aquifer_process_close(self), -EBUSY, "the close with a segment");
        expect(done(aquifer_segment_list(self, status, 4)), 1, "the list");
        if (status[0].id != i || status[0].bytes != SIZES[i] || status[0].missing_bytes)
            errx(1, "the list is wrong");
        connect_to(segment, peer);
        char *address = aquifer_segment_address(segment);
        done(aquifer_segment_transfer(segment));
        for (size_t at = 0; at < SIZES[i]; at += SIZES[i] / 64)
            expect(touch(address + at), SIGSEGV, "a touch after the transfer");
        segment = receive(self, AQUIFER_PULL_AHEAD);
        if (aquifer_segment_address(segment) != address)
            errx(1, "it has other addresses");
        check(segment, 2);
        done(aquifer_segment_deallocate(segment));
        expect(touch(address), SIGSEGV, "a touch after the end");
    }
}

static void be_peer(aquifer_process *self, const char *peer)
{
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
    {
        aquifer_segment *segment = receive(self, AQUIFER_PULL_AHEAD);
        check(segment, 1);
        fill(segment, 2);
        connect_to(segment, peer);
        done(aquifer_segment_transfer(segment));
    }
}

static void give(aquifer_process *self, const char *peer)
{
    aquifer_segment *segment;
    done(aquifer_segment_allocate(self, getpid(), SIZES[0], &segment));
    fill(segment, 3);
    connect_to(segment, peer);
    done(aquifer_segment_transfer(segment));
}

static void get(aquifer_process *self)
{
    aquifer_segment *segment = receive(self, AQUIFER_PULL_EXPLICIT);
    char *address = aquifer_segment_address(segment);
    int zeros = open("/dev/zero", O_RDONLY);
    if (zeros < 0)
        err(1, "/dev/zero");
    /* Its source has ended by now or will soon; nothing was pulled yet. */
    for (int page = 0; page < 3; page++)
    {
        expect(touch(address + page * PAGE), SIGBUS, "a touch before the pull");
        if (read(zeros, address + page * PAGE, 1) != -1 || errno != EFAULT)
            errx(1, "the kernel has touched a page that is not here");
    }
    done(aquifer_segment_pull(segment, PAGE, 1));
    expect(touch(address + PAGE), 0, "a touch after the pull");
    expect(touch(address), SIGBUS, "a touch beside the pull");
    expect(touch(address + 2 * PAGE), SIGBUS, "a touch behind the pull");
    expect(aquifer_segment_pull(segment, SIZES[0], 1), -EACCES, "a pull past the end");
    done(aquifer_segment_close(segment));
    check(segment, 3);
    aquifer_segment_status status;
    expect(done(aquifer_segment_list(self, &status, 1)), 1, "the list");
    if (status.missing_bytes)
        errx(1, "something is missing after the close");
    done(aquifer_segment_deallocate(segment));
}

static void be_orphan(aquifer_process *self, int pulling)
{
    /* A touch that waits for ever is a failure, too. */
    alarm(2 * PATIENCE_MS / 1000);
    puts("open");
    fflush(stdout);
    getchar();
    aquifer_segment *segment = receive(self, pulling);
    char *address = aquifer_segment_address(segment);
    puts("received");
    fflush(stdout);
    if (pulling == AQUIFER_PULL_EXPLICIT)
        while (getchar() != '\n');
    for (size_t at = 0; at < SIZES[0]; at += PAGE)
    {
        int number = touch(address + at);
        if (number == SIGBUS || number == SIGSEGV)
        {
            puts(number == SIGBUS ? "SIGBUS" : "SIGSEGV");
            exit(0);
        }
        expect(number, 0, "a touch");
        if (*(uint64_t *)(address + at) == 0)
            errx(1, "a page that is elsewhere is zero");
    }
    errx(1, "all pages are here");
}

/* Touches a segment of its own until that is SIGSEGV, and prints when the last touch began that was
   none, in nanoseconds of the monotonic clock. */
static void own(aquifer_process *self)
{
    aquifer_segment *segment;
    struct timespec touched = {0};
    alarm(2 * PATIENCE_MS / 1000);
    done(aquifer_segment_allocate(self, 1, PAGE, &segment));
    puts("own");
    fflush(stdout);
    for (;;)
    {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        int number = touch(aquifer_segment_address(segment));
        if (number == SIGSEGV)
        {
            printf("SIGSEGV\n%jd\n", touched.tv_sec * (intmax_t)1000000000 + touched.tv_nsec);
            exit(0);
        }
        expect(number, 0, "a touch");
        touched = now;
    }
}

static void give_up(aquifer_process *self)
{
    aquifer_segment *segment = receive(self, AQUIFER_PULL_EXPLICIT);
    puts("received");
    fflush(stdout);
    getchar();
    /* Nothing of it is here, and the host that has it is gone. */
    if (aquifer_segment_revert(segment) >= 0)
        errx(1, "lost pages were found");
    done(aquifer_segment_give_up(segment));
    expect(done(aquifer_segment_restore(self, 9, PATIENCE_MS, &segment)), 1, "what was synced");
    check(segment, 6);
    done(aquifer_segment_deallocate(segment));
}

static void sync_and_move(aquifer_process *self, unsigned copies)
{
    aquifer_segment *segment, *other;
    done(aquifer_segment_allocate(self, 9, SIZES[0], &segment));
    expect(aquifer_segment_revert(segment), -ENODATA, "a revert before the first sync");
    expect(aquifer_segment_restore(self, 8, 0, &other), -ENODATA, "a segment that there never was");
    expect(aquifer_segment_sync(segment, 0), -EINVAL, "no copies");
    fill(segment, 4);
    done(aquifer_segment_sync(segment, 2));
    expect(aquifer_segment_restore(self, 9, 0, &other), 0, "a segment that is here");
    fill(segment, 5);
    done(aquifer_segment_revert(segment));
    check(segment, 4);
    puts("synced");
    fflush(stdout);
    aquifer_event event;
    expect(done(aquifer_process_next_event(self, AQUIFER_PULL_AHEAD, PATIENCE_MS, &event)), 1, "an event");
    if (event.segment || event.id != 9)
        errx(1, "asked for segment %ju", (uintmax_t)event.id);
    fill(segment, 6);
    done(aquifer_segment_connect(segment, event.process));
    const char *start = aquifer_segment_address(segment);
    done(aquifer_segment_sync_and_transfer(segment, copies));
    expect(touch(start), SIGSEGV, "a touch of what was handed over");
}

int main(int count, char **words)
{
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    if (count < 3)
        errx(2, "usage: segments home|peer|give|orphan|own|synced|lost|get NAME [PEER]");
    aquifer_process *self = open_name(words[2]);
    if (count > 3 && !strcmp(words[1], "home"))
        home(self, words[3]);
    else if (count > 3 && !strcmp(words[1], "peer"))
        be_peer(self, words[3]);
    else if (count > 3 && !strcmp(words[1], "give"))
        give(self, words[3]);
    else if (count > 3 && !strcmp(words[1], "orphan"))
        be_orphan(self, strcmp(words[3], "explicit") ? AQUIFER_PULL_AHEAD : AQUIFER_PULL_EXPLICIT);
    else if (!strcmp(words[1], "own"))
        own(self);
    else if (count > 3 && !strcmp(words[1], "synced"))
        sync_and_move(self, atoi(words[3]));
    else if (!strcmp(words[1], "lost"))
        give_up(self);
    else if (!strcmp(words[1], "get"))
        get(self);
    else
        errx(2, "usage: segments home|peer|give|orphan|own|synced|lost|get NAME [PEER]");
    done(aquifer_process_close(self));
    /* The name is free again, and the addresses. */
    done(aquifer_process_close(open_name(words[2])));
    puts("done");
}
