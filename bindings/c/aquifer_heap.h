/* libaquifer: heaps of objects in remote memory, for programs in C.
 *
 *     aquifer_heap *heap = aquifer_heap_open(NULL, 0);
 *     aquifer_pointer pointer;
 *     char bytes[8];
 *     if (!heap || aquifer_heap_create(heap, "far away", 8, &pointer) < 0 ||
 *         aquifer_heap_get(heap, &pointer, bytes, 8) < 0)
 *         errx(1, "%s", aquifer_error());
 *
 * A pointer is valid until its object is freed, even if the object is moved. It may be copied,
 * stored, and used by every process of the same user.
 *
 * A function that returns an int returns a negative errno on failure, and aquifer_error() of
 * aquifer.h a text. Each function can return these:
 * -EINVAL: an argument is a null pointer, or not a pointer of an object;
 * -ENOENT: there is no such object: it was freed, or the pointer is wrong;
 * -EFBIG: the object is smaller than the requested range, or would be larger than 64 MiB;
 * -ENOMEM: the heap is full;
 * -EDQUOT: the heap was closed, because programs of the user continued to fill more memory than its
 * limit by reading addresses without objects;
 * -EAGAIN: the object stayed busy until the retries timed out;
 * -ECONNRESET, -ETIMEDOUT: the connection broke, or there was no answer. Whether a change was made
 * is unknown; the next call connects again;
 * -ENOTCONN: no connection can be made;
 * -EIO: the service has sent an invalid answer;
 * -ECHILD: this process is a forked child of the process that opened the heap.
 *
 * All functions are thread-safe. Calls for one heap are serialised, so each thread should open the
 * heap itself.
 */
#ifndef AQUIFER_HEAP_H
#define AQUIFER_HEAP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Size of the largest object. */
#define AQUIFER_OBJECT_BYTES_MAX (64u << 20)

typedef struct aquifer_heap aquifer_heap;

/* A pointer to an object. All bits zero are no pointer. */
typedef struct aquifer_pointer {
    uint64_t words[2];
} aquifer_pointer;

/* Opens the heap of this user on a node. If `node` is 0, the agent chooses a node, if possible one
 * of this machine. `socket` is as for aquifer_open. Returns NULL on failure. */
aquifer_heap *aquifer_heap_open(const char *socket, uint16_t node);

/* Closes a heap, and keeps its objects. Ignores NULL. A forked child may close the heap of its
 * parent; in the parent the heap stays open. */
void aquifer_heap_close(aquifer_heap *heap);

/* Returns the root object of the heap, from which programs find their other objects. The first call
 * allocates it, with `bytes` zero bytes. */
int aquifer_heap_root(aquifer_heap *heap, uint32_t bytes, aquifer_pointer *pointer);

/* Allocate an object of `bytes` bytes, 1 to AQUIFER_OBJECT_BYTES_MAX, of zeros or with the bytes
 * at `from`. */
int aquifer_heap_allocate(aquifer_heap *heap, uint32_t bytes, aquifer_pointer *pointer);
int aquifer_heap_create(aquifer_heap *heap, const void *from, size_t bytes, aquifer_pointer *pointer);

/* Frees an object. */
int aquifer_heap_free(aquifer_heap *heap, const aquifer_pointer *pointer);

/* Reads the first bytes of an object one-sidedly. Corrects the pointer if the object was moved; the
 * old pointer stays valid. */
int aquifer_heap_get(aquifer_heap *heap, aquifer_pointer *pointer, void *out, size_t bytes);

/* Reads the first bytes of several objects concurrently. The buffers of jobs must not overlap. On
 * failure no bytes are valid. */
typedef struct aquifer_get_job {
    aquifer_pointer pointer;
    void *out;
    size_t bytes;
} aquifer_get_job;
int aquifer_heap_get_many(aquifer_heap *heap, aquifer_get_job *jobs, size_t count);

/* Reads the first bytes of an object one-sidedly, without a retry. Returns 0 if they are valid.
 * -EAGAIN: the object was changed meanwhile;
 * -ESTALE: the object was moved: aquifer_heap_get corrects the pointer. */
int aquifer_heap_direct_read(aquifer_heap *heap, const aquifer_pointer *pointer, void *out, size_t bytes);

/* Reads the first bytes of an object, at most 32 KiB, by a request to the service. Returns 1 if the
 * pointer is old (see aquifer_heap_release), and otherwise 0. */
int aquifer_heap_read(aquifer_heap *heap, aquifer_pointer *pointer, void *out, size_t bytes);

/* Replace the first bytes of an object; or up to 32 KiB from `offset` on, a multiple of 8; or up to
 * 32 KiB of the first bytes if the first word is `expected` (little-endian). A reader sees all of
 * the new bytes or none. Return 1 if the pointer is old, and otherwise 0.
 * -ECANCELED: the first word is not `expected`. */
int aquifer_heap_write(aquifer_heap *heap, aquifer_pointer *pointer, const void *from, size_t bytes);
int aquifer_heap_write_at(aquifer_heap *heap, aquifer_pointer *pointer, uint32_t offset, const void *from,
                          size_t bytes);
int aquifer_heap_write_if(aquifer_heap *heap, aquifer_pointer *pointer, uint64_t expected, const void *from,
                          size_t bytes);

/* Replaces an old pointer by one with the object's current address, so that the old address is
 * freed. No other copy of the old pointer may be used any more. */
int aquifer_heap_release(aquifer_heap *heap, aquifer_pointer *pointer);

/* Operations with completions: a program begins them, continues, and takes their completions later.
 * A thread of the queue carries them out in the order in which they were begun, and consecutive
 * gets concurrently. Bytes to write are copied when the operation begins. The buffer of a get must
 * stay valid until its completion was taken, and is written only by the call that takes it. */
typedef struct aquifer_heap_queue aquifer_heap_queue;

/* Open and close a queue, with the arguments of aquifer_heap_open and aquifer_heap_close. An
 * operation that has not ended at the close may be carried out or not. */
aquifer_heap_queue *aquifer_heap_queue_open(const char *socket, uint16_t node);
void aquifer_heap_queue_close(aquifer_heap_queue *queue);

/* Begin an operation. Its completion carries `user`.
 * -EAGAIN: the queue is full: the completions of 1024 operations were not taken. */
int aquifer_heap_begin_allocate(aquifer_heap_queue *queue, uint32_t bytes, uint64_t user);
int aquifer_heap_begin_create(aquifer_heap_queue *queue, const void *from, size_t bytes, uint64_t user);
int aquifer_heap_begin_free(aquifer_heap_queue *queue, const aquifer_pointer *pointer, uint64_t user);
int aquifer_heap_begin_get(aquifer_heap_queue *queue, const aquifer_pointer *pointer, void *out, size_t bytes,
                           uint64_t user);
int aquifer_heap_begin_write(aquifer_heap_queue *queue, const aquifer_pointer *pointer, const void *from,
                             size_t bytes, uint64_t user);
int aquifer_heap_begin_release(aquifer_heap_queue *queue, const aquifer_pointer *pointer, uint64_t user);

/* The completion of an operation: the new or corrected pointer, and the return value of the
 * corresponding call without a queue. */
typedef struct aquifer_heap_end {
    uint64_t user;
    aquifer_pointer pointer;
    int value;
} aquifer_heap_end;

/* Takes up to `max` completions. Waits for the first one for up to `timeout_ms` milliseconds, or
 * without a limit if that is negative. Returns the number of completions. Returns 0 at once if no
 * operation is in flight. */
int aquifer_heap_wait(aquifer_heap_queue *queue, aquifer_heap_end *ends, size_t max, int timeout_ms);

/* Returns a descriptor for poll(2) that is readable while there are completions to take. The queue
 * closes it. */
int aquifer_heap_queue_fd(aquifer_heap_queue *queue);

#ifdef __cplusplus
}
#endif

#endif
