// A process that is paged has the threads, children and rights that it would have without that, and
// is paged while it is stopped, traced, sandboxed or ending.
#include "content.h"
#include "tests.h"
#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK_BYTES = 1 << 20, EXIT_RAW = 7 };

// ---- its threads and children -------------------------------------------------------------------

static int threads(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL) die("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static void verify_alone(void) {
    if (threads() != 1) fail("alone", "there is a thread that the program has not made");
    if (waitpid(-1, NULL, WNOHANG | __WALL) != -1 || errno != ECHILD)
        fail("alone", "there is a child that the program has not made");
}

void test_alone(void) {
    struct numbers numbers = numbers_new(4000);
    struct area area = area_half("alone");
    modify_and_verify(&area, &numbers);
    verify_alone();
    pid_t child = forked();
    if (child == 0) {
        verify_alone();
        // Only a process of one thread may do that. The system can refuse it for other reasons.
        if (unshare(CLONE_NEWUSER) != 0 && errno == EINVAL) fail("alone", "the child has two threads");
        modify_and_verify(&area, &numbers);
        verify_alone();
        _exit(0);
    }
    modify_and_verify(&area, &numbers);
    expect_end(child, "alone", "a child's memory was wrong");
    verify_alone();
    finish(&area);
}

// ---- a sandbox around all threads ---------------------------------------------------------------

static void enter_sandbox(void) {
    static const int allowed[] = {SYS_read,  SYS_write, SYS_mmap,  SYS_munmap,    SYS_exit_group,
                                  SYS_futex, SYS_brk,   SYS_fstat, SYS_newfstatat};
    enum { CALLS = sizeof allowed / sizeof *allowed };
    struct sock_filter filter[2 * CALLS + 2];
    unsigned used = 0;
    unsigned number_at = offsetof(struct seccomp_data, nr);
    filter[used++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, number_at);
    for (unsigned i = 0; i < CALLS; i++) {
        unsigned number = (unsigned)allowed[i];
        filter[used++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1);
        filter[used++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[used++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {(unsigned short)used, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) die("PR_SET_NO_NEW_PRIVS");
    long result = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
    if (result != 0) die("seccomp");
}

void test_sandboxed(void) {
    struct numbers numbers = numbers_new(4100);
    struct area area = area_half("sandboxed"), other = area_half("sandboxed");
    modify_and_verify(&area, &numbers);
    enter_sandbox();
    for (unsigned round = 0; round < options.rounds; round++) {
        modify_and_verify(&other, &numbers);
        modify_and_verify(&area, &numbers);
    }
    area_free(&other);
    finish(&area);
}

// ---- a sandbox in which the worker cannot find out whether it is the last process ---------------

static void *work_alone(void *area) {
    struct numbers numbers = {1};
    for (unsigned round = 0; round < options.rounds; round++) modify_and_verify(area, &numbers);
    _exit(0);
}

void test_no_unshare(void) {
    struct numbers numbers = numbers_new(4150);
    struct area area = area_half("no-unshare");
    modify_and_verify(&area, &numbers);
    pid_t sandbox = forked();
    if (sandbox == 0) {
        struct sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) die("PR_SET_NO_NEW_PRIVS");
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0) die("seccomp");
        pid_t child = forked();
        if (child == 0) {
            // The thread that has started the worker ends, and the process does not.
            pthread_t thread;
            if (pthread_create(&thread, NULL, work_alone, &area) != 0) die("pthread_create");
            pthread_exit(NULL);
        }
        _exit(status_of(child) == 0 ? 0 : 1);
    }
    expect_end(sandbox, "no-unshare", "a child's memory was wrong");
    modify_and_verify(&area, &numbers);
    finish(&area);
}

// ---- a process whose last thread ends by the system call `exit` ---------------------------------

static struct area inherited;

static int end_by_exit(void *argument) {
    (void)argument;
    modify_and_verify(&inherited, &(struct numbers){1});
    return EXIT_RAW;
}

void test_raw_exit(void) {
    struct numbers numbers = numbers_new(4200);
    inherited = area_half("raw-exit");
    modify_and_verify(&inherited, &numbers);
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) die("mmap of a stack");
    pid_t child = clone(end_by_exit, stack + STACK_BYTES, SIGCHLD, NULL);
    if (child < 0) die("clone");
    int status = status_of(child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_RAW) fail("raw-exit", "the child did not end well");
    modify_and_verify(&inherited, &numbers);
    finish(&inherited);
}

// ---- a process that is stopped with much of the run's memory ------------------------------------

static void traced(pid_t pid, bool starts) {
    int status;
    if (!starts) {
        if (ptrace(PTRACE_DETACH, pid, 0, 0) != 0) die("PTRACE_DETACH");
        return;
    }
    if (ptrace(PTRACE_SEIZE, pid, 0, 0) != 0 || ptrace(PTRACE_INTERRUPT, pid, 0, 0) != 0) die("ptrace");
    if (waitpid(pid, &status, __WALL) != pid || !WIFSTOPPED(status)) die("waitpid of a traced child");
}

static void stopped(pid_t pid, bool starts) {
    if (kill(starts ? -pid : pid, starts ? SIGSTOP : SIGCONT) != 0) die("kill");
    int status;
    if (starts && (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status)))
        die("waitpid of a stopped child");
}

static void while_it_stands(const char *test, void (*hold)(pid_t, bool), uint64_t stream) {
    struct numbers numbers = numbers_new(stream);
    struct area area = area_half(test);
    int begun[2], resumed[2];
    if (pipe(begun) != 0 || pipe(resumed) != 0) die("pipe");
    pid_t child = forked();
    if (child == 0) {
        char byte;
        if (setpgid(0, 0) != 0) _exit(2);
        modify_and_verify(&area, &numbers);
        if (write(begun[1], "x", 1) != 1 || read(resumed[0], &byte, 1) != 1) _exit(2);
        modify_and_verify(&area, &numbers);
        _exit(0);
    }
    char byte;
    if (read(begun[0], &byte, 1) != 1) fail(test, "the child has ended");
    hold(child, true);
    for (unsigned round = 0; round < options.rounds * 2; round++) modify_and_verify(&area, &numbers);
    hold(child, false);
    if (write(resumed[1], "x", 1) != 1) die("write");
    expect_end(child, test, "the child's memory was wrong");
    finish(&area);
}

void test_stopped(void) {
    while_it_stands("stopped", stopped, 4300);
}

void test_traced(void) {
    while_it_stands("traced", traced, 4400);
}

// ---- a process that ends while others need its memory -------------------------------------------

static int outlive(void *pipe_ends) {
    int *ends = pipe_ends;
    char byte;
    close(ends[1]);
    // The end of file: the process whose memory this is has ended.
    if (read(ends[0], &byte, 1) != 0) return 2;
    for (unsigned round = 0; round < options.rounds; round++)
        modify_and_verify(&inherited, &(struct numbers){1});
    return 0;
}

// Waits for all children, in each way to wait. There are `count`, also if this process adopts them.
static void expect_ends(const char *test, int count) {
    for (int way = 0;; way++) {
        siginfo_t info = {0};
        struct rusage usage;
        int status = 0;
        pid_t pid = 0;
        switch (way % 5) {
        case 0: pid = wait(&status); break;
        case 1: pid = waitpid(-1, &status, 0); break;
        case 2: pid = wait4(-1, &status, 0, &usage); break;
        case 3: pid = (pid_t)syscall(SYS_wait4, -1, &status, 0, NULL); break;
        case 4:
            pid = waitid(P_ALL, 0, &info, WEXITED) == 0 ? info.si_pid : -1;
            status = info.si_status;
            break;
        }
        if (pid < 0) break;
        if (status != 0) fail(test, "a process read wrong memory");
        count--;
    }
    if (errno != ECHILD) die("wait");
    if (count != 0) fail(test, "there is a child that the program has not made");
}

void test_outlive(void) {
    struct numbers numbers = numbers_new(9000);
    inherited = area_half("outlive");
    modify_and_verify(&inherited, &numbers);
    int ends[2];
    if (pipe(ends) != 0) die("pipe");
    // Processes that lose their parent become children of this one, and it has to wait for them.
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) die("prctl");
    pid_t first = forked();
    if (first == 0) {
        struct area other = area_half("outlive");
        modify_and_verify(&other, &numbers);
        verify_all(&inherited);
        char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED || clone(outlive, stack + STACK_BYTES, CLONE_VM | SIGCHLD, ends) < 0)
            _exit(2);
        _exit(0);
    }
    close(ends[1]);
    expect_ends("outlive", 2);
    finish(&inherited);
}

// The parent ends while its last pages are on their way out, and the child needs them.
void test_fork_exit(void) {
    struct numbers numbers = numbers_new(4500);
    struct area area = area_half("fork-exit");
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) die("prctl");
    for (unsigned round = 0; round < options.rounds * 2; round++) {
        modify_and_verify(&area, &numbers);
        pid_t parent = forked();
        if (parent == 0) {
            modify_and_verify(&area, &numbers);
            if (forked() != 0) _exit(0);
            verify_all(&area);
            _exit(0);
        }
        expect_ends("fork-exit", 2);
    }
    finish(&area);
}
