/* Uses each function of aquifer_heap.h once or more, and compares all bytes. Prints "done". */
#include <aquifer.h>
#include <aquifer_heap.h>

#include <err.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OBJECTS = 2000, LARGE = 3000000 };

static int done(int value)
{
    if (value < 0)
        errx(1, "%s", aquifer_error());
    return value;
}

static void expect(int value, int wanted)
{
    if (value != wanted)
        errx(1, "%d instead of %d: %s", value, wanted, aquifer_error());
}

static void same(const void *found, const void *wanted, size_t bytes)
{
    if (memcmp(found, wanted, bytes))
        errx(1, "an object has other bytes");
}

/* Begins many operations at once, and takes their ends. */
static void use_queue(void)
{
    enum { COUNT = 300 };
    static aquifer_heap_end ends[COUNT];
    static aquifer_pointer pointers[COUNT];
    static unsigned found[COUNT];
    aquifer_heap_queue *queue = aquifer_heap_queue_open(NULL, 0);
    if (!queue)
        errx(1, "%s", aquifer_error());
    expect(aquifer_heap_wait(queue, ends, COUNT, -1), 0);
    for (unsigned i = 0; i < COUNT; i++) done(aquifer_heap_begin_create(queue, &i, sizeof i, i));
    for (int taken = 0; taken < COUNT;)
    {
        struct pollfd ready = {aquifer_heap_queue_fd(queue), POLLIN, 0};
        if (poll(&ready, 1, -1) != 1)
            err(1, "poll");
        int count = done(aquifer_heap_wait(queue, ends, COUNT, 0));
        for (int i = 0; i < count; i++)
        {
            done(ends[i].value);
            pointers[ends[i].user] = ends[i].pointer;
        }
        taken += count;
    }
    unsigned changed = 77777;
    done(aquifer_heap_begin_write(queue, &pointers[3], &changed, sizeof changed, 0));
    for (unsigned i = 0; i < COUNT; i++)
        done(aquifer_heap_begin_get(queue, &pointers[i], &found[i], sizeof found[i], i));
    done(aquifer_heap_begin_release(queue, &pointers[4], 0));
    for (unsigned i = 0; i < COUNT; i++) done(aquifer_heap_begin_free(queue, &pointers[i], 0));
    done(aquifer_heap_begin_allocate(queue, AQUIFER_OBJECT_BYTES_MAX + 5000, 9));
    for (int left = 2 * COUNT + 3; left > 0;)
    {
        int count = done(aquifer_heap_wait(queue, ends, COUNT, -1));
        left -= count;
        for (int i = 0; i < count; i++)
            if (left > 0 || i + 1 < count)
                done(ends[i].value);
        if (left == 0)
            expect(ends[count - 1].value, -EFBIG);
    }
    for (unsigned i = 0; i < COUNT; i++)
        if (found[i] != (i == 3 ? changed : i))
            errx(1, "object %u is %u", i, found[i]);
    expect(aquifer_heap_begin_free(queue, NULL, 0), -EINVAL);
    aquifer_heap_queue_close(queue);
}

int main(void)
{
    static aquifer_pointer pointers[OBJECTS];
    static unsigned numbers[OBJECTS], found[OBJECTS];
    static aquifer_get_job jobs[OBJECTS];
    aquifer_pointer root, large, none = {{0, 0}};
    char *bytes = malloc(LARGE), *out = malloc(LARGE);
    uint64_t word = 1;
    aquifer_heap *heap = aquifer_heap_open(NULL, 0);
    if (!heap || !bytes || !out)
        errx(1, "%s", aquifer_error());

    done(aquifer_heap_root(heap, 100, &root));
    for (unsigned i = 0; i < OBJECTS; i++) {
        numbers[i] = i * 7919;
        if (i % 2)
            done(aquifer_heap_create(heap, &numbers[i], sizeof numbers[i], &pointers[i]));
        else {
            done(aquifer_heap_allocate(heap, sizeof numbers[i], &pointers[i]));
            expect(aquifer_heap_write(heap, &pointers[i], &numbers[i], sizeof numbers[i]), 0);
        }
        jobs[i] = (aquifer_get_job){pointers[i], &found[i], sizeof found[i]};
    }
    done(aquifer_heap_get_many(heap, jobs, OBJECTS));
    same(found, numbers, sizeof numbers);
    for (unsigned i = 0; i < OBJECTS; i++) {
        done(aquifer_heap_get(heap, &pointers[i], &found[0], sizeof found[0]));
        same(&found[0], &numbers[i], sizeof numbers[i]);
    }
    done(aquifer_heap_direct_read(heap, &pointers[5], &found[0], sizeof found[0]));
    same(&found[0], &numbers[5], sizeof numbers[5]);
    done(aquifer_heap_read(heap, &pointers[6], &found[0], sizeof found[0]));
    same(&found[0], &numbers[6], sizeof numbers[6]);
    done(aquifer_heap_release(heap, &pointers[6]));

    expect(aquifer_heap_write_if(heap, &root, 5, &word, sizeof word), -ECANCELED);
    expect(aquifer_heap_write_if(heap, &root, 0, &word, sizeof word), 0);
    done(aquifer_heap_write_at(heap, &root, 96, "end", 4));
    done(aquifer_heap_get(heap, &root, out, 100));
    same(out, &word, sizeof word);
    same(out + 96, "end", 4);

    for (int i = 0; i < LARGE; i++) bytes[i] = (char)(i * 31 + i / 4096);
    done(aquifer_heap_create(heap, bytes, LARGE, &large));
    done(aquifer_heap_get(heap, &large, out, LARGE));
    same(out, bytes, LARGE);
    bytes[77] ^= 1;
    done(aquifer_heap_write(heap, &large, bytes, LARGE));
    done(aquifer_heap_get(heap, &large, out, LARGE));
    same(out, bytes, LARGE);

    done(aquifer_heap_free(heap, &large));
    expect(aquifer_heap_get(heap, &large, out, LARGE), -ENOENT);
    expect(aquifer_heap_get(heap, &root, out, LARGE), -EFBIG);
    expect(aquifer_heap_get(heap, &none, out, 1), -EINVAL);
    expect(aquifer_heap_allocate(heap, AQUIFER_OBJECT_BYTES_MAX + 5000, &large), -EFBIG);
    pid_t child = fork();
    if (child == 0)
    {
        int freed = aquifer_heap_free(heap, &root);
        aquifer_heap_close(heap);
        _exit(freed == -ECHILD ? 0 : 1);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        errx(1, "a child can use the heap");
    for (unsigned i = 0; i < OBJECTS; i++) done(aquifer_heap_free(heap, &pointers[i]));
    use_queue();
    aquifer_heap_close(heap);
    puts("done");
    return 0;
}
