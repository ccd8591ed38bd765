/* libaquifer: allocation inside segments, for programs in C and C++. The C++ header
 * aquifer_containers.hpp uses these functions.
 *
 * The state of the heap is in the segment: a process that receives the segment opens the heap, and
 * continues with its root. Errors are as in aquifer_segments.h.
 */
#ifndef AQUIFER_CONTAINERS_H
#define AQUIFER_CONTAINERS_H

#include "aquifer_segments.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The heap of a segment: an address in it, the same in each process. */
typedef struct aquifer_segment_heap aquifer_segment_heap;

/* Creates a heap in an allocated segment. `type` describes the type of the root, in at most about
 * 1900 bytes. Both processes must use the same description; types with different memory layouts
 * must have different descriptions.
 * -ENOMEM: the segment is too small. */
int aquifer_segment_heap_create(aquifer_segment *segment, const char *type, aquifer_segment_heap **heap);

/* Opens the heap of a segment that was received.
 * -ENODATA: the segment has no heap;
 * -EPROTOTYPE: the root is of another type, or of another build of libaquifer; the text has both
 * descriptions. */
int aquifer_segment_heap_open(aquifer_segment *segment, const char *type, aquifer_segment_heap **heap);

/* Allocates memory; NULL if the segment is full. `align` is a power of two. Thread-safe. */
void *aquifer_segment_heap_allocate(aquifer_segment_heap *heap, size_t bytes, size_t align);

/* Frees memory, with the alignment with which it was allocated. Ignores NULL. */
void aquifer_segment_heap_free(aquifer_segment_heap *heap, void *memory, size_t align);

/* Return and set the root: the object from which a process finds all others; NULL at first. */
void *aquifer_segment_heap_root(aquifer_segment_heap *heap);
void aquifer_segment_heap_set_root(aquifer_segment_heap *heap, void *root);

#ifdef __cplusplus
}
#endif

#endif
