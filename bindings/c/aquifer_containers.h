/* libaquifer: allocation inside segments, for programs in C and C++. In C++, aquifer_containers.hpp
 * is made of it.
 *
 * The heap lies in the segment, and so do all pointers of it: a process that receives the segment
 * opens the heap and goes on with its root. Errors are as in aquifer_segments.h.
 */
#ifndef AQUIFER_CONTAINERS_H
#define AQUIFER_CONTAINERS_H

#include "aquifer_segments.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The heap of a segment: an address in it, the same in each process. */
typedef struct aquifer_segment_heap aquifer_segment_heap;

/* Makes an allocated segment one with a heap. `type` says what its root is, in words that the other
 * process must use, too: what differs in memory must differ there. At most about 1900 bytes.
 * -ENOMEM: the segment is too small. */
int aquifer_segment_heap_create(aquifer_segment *segment, const char *type, aquifer_segment_heap **heap);

/* Opens the heap of a segment that was received.
 * -ENODATA: it has none;
 * -EPROTOTYPE: it has a root of another type, or of another build of libaquifer; the text tells. */
int aquifer_segment_heap_open(aquifer_segment *segment, const char *type, aquifer_segment_heap **heap);

/* Allocates memory; NULL if the segment is full. `align` is a power of two. Thread-safe. */
void *aquifer_segment_heap_allocate(aquifer_segment_heap *heap, size_t bytes, size_t align);

/* Frees memory, with the alignment with which it was allocated. Ignores NULL. */
void aquifer_segment_heap_free(aquifer_segment_heap *heap, void *memory, size_t align);

/* The object with which the next process begins; NULL at first. */
void *aquifer_segment_heap_root(aquifer_segment_heap *heap);
void aquifer_segment_heap_set_root(aquifer_segment_heap *heap, void *root);

#ifdef __cplusplus
}
#endif

#endif
