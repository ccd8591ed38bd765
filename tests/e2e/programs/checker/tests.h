// The checker's tests. Each works on about options.bytes, ends the program at the first wrong byte,
// and else prints a line that is the same on every run with the same options.
#ifndef CHECKER_TESTS_H
#define CHECKER_TESTS_H

#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

void test_pages(void);     // areas.c
void test_mremap(void);    // moves.c
void test_dontunmap(void); // moves.c
void test_grow(void);      // moves.c
void test_joined(void);    // moves.c
void test_move_several(void); // moves.c
void test_cleared_word(void); // limits.c
void test_full_fork(void);    // limits.c
void test_fullest_fork(void); // limits.c
void test_fewest_fork(void);   // limits.c
struct rlimit use_up_descriptors(bool is_hard); // limits.c
void test_guarded_blocks(void); // limits.c
void test_brk(void);       // moves.c
void test_madvise(void);   // areas.c
void test_remap(void);     // areas.c
void test_sparse(void);    // areas.c
void test_steps(void);     // steps.c
void test_fork(void);      // processes.c
void test_fork_storm(void);
void test_family(void);    // processes.c
void test_threads(void);   // threads.c
void test_syscalls(void);  // syscalls.c
void test_protect(void);   // pinned.c
void test_pinned(void);    // pinned.c
void test_lock_all(void);  // pinned.c
void test_read_only(void); // pinned.c

// What few programs do: unusual.c
void test_daemon(void);
void test_setuid(void);
void test_populate(void);
void test_populate_all(void);
void test_direct(void);
void test_signal_stack(void);
void test_robust(void);

// Children in places where the agent's socket has no name, and the first process of a PID
// namespace: places.c
void test_chroot(void);
void test_namespaces(void);
void test_first(void);

// Threads, children and rights: alone.c
void test_alone(void);
void test_sandboxed(void);
void test_no_unshare(void);
void test_raw_exit(void);
void test_stopped(void);
void test_traced(void);
void test_outlive(void);
void test_fork_exit(void);

// Memory that changes without an event of the kernel: advice.c
void test_wipe_on_fork(void);
void test_wipe_on_clone(void);
void test_dont_fork(void);
void test_guard(void);
void test_shm_remap(void);

// Ways to make a child: children.c
void test_by_fork(void);
void test_by_fork_alone(void);
void test_by_clone(void);
void test_by_raw_clone(void);
void test_by_raw_clone3(void);
void test_by_vfork(void);
void test_by_clone_vm(void);
void test_by_spawn(void);

// What the program does when the fork test has it run itself.
int executed_child(int argc, char **argv); // processes.c

// Forks, or ends the program.
pid_t forked(void); // processes.c
// Waits for a child's end.
int status_of(pid_t pid); // processes.c
// Waits for a child's end, and fails unless the child exits with 0.
void expect_end(pid_t pid, const char *test, const char *otherwise); // processes.c

// Runs `work(number)` on options.threads threads, and waits for all of them.
void on_threads(void (*work)(unsigned number)); // threads.c

#endif
