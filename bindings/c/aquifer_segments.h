/* libaquifer: segments, memory at fixed addresses that moves to another process with the data
 * structures in it, for programs in C and C++.
 *
 *     aquifer_process *self = aquifer_process_open(NULL, "first");
 *     aquifer_segment *segment;
 *     if (!self || aquifer_segment_allocate(self, 7, 1 << 20, &segment) < 0)
 *         errx(1, "%s", aquifer_error());
 *     struct list *list = aquifer_segment_address(segment);
 *     ...
 *     if (aquifer_segment_connect(segment, "second") < 0 || aquifer_segment_transfer(segment) < 0)
 *         errx(1, "%s", aquifer_error());
 *
 * A segment has the same addresses in each process of its user, so pointers within it stay valid.
 * Its owner works on plain memory. A forked child has no access to the segments of its parent.
 *
 * A function that returns an int returns a negative errno on failure, and aquifer_error() of
 * aquifer.h a text. Each function can return these:
 * -EINVAL: an argument is a null pointer, or no text in UTF-8;
 * -EACCES: the agent cannot do it; the text tells why;
 * -ENOMEM: the segment cannot be mapped;
 * -ENOTCONN: no agent answers;
 * -EPIPE: the agent has ended, and no other has come within its grace time;
 * -EIO: the agent gave an invalid answer;
 * -ECHILD: this process is a forked child of the process that opened the name.
 *
 * All functions are thread-safe, but a segment must not be used any more once a call consumes it,
 * and not at the same time as a sync or a revert.
 */
#ifndef AQUIFER_SEGMENTS_H
#define AQUIFER_SEGMENTS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct aquifer_process aquifer_process;
typedef struct aquifer_segment aquifer_segment;

/* Opens this process under a name of 1 to 64 letters, digits and ._-, which no other process of the
 * user has. A process has one name. `socket`: as for aquifer_open. Returns NULL on failure. */
aquifer_process *aquifer_process_open(const char *socket, const char *name);

/* Closes the name. The next process of this name receives the segments that this one owns. Ignores
 * NULL. -EBUSY: a segment was not consumed. */
int aquifer_process_close(aquifer_process *process);

/* Allocates a segment of whole pages, all zeros. Its number is new among the user's segments. */
int aquifer_segment_allocate(aquifer_process *process, uint64_t id, uint64_t bytes,
                             aquifer_segment **segment);

/* How the pages of a segment come that are elsewhere: on touch and ahead of it; or only those that
 * are pulled by a call, and touching another page is SIGBUS; or on touch only. */
enum { AQUIFER_PULL_AHEAD = 0, AQUIFER_PULL_EXPLICIT = 1, AQUIFER_PULL_ON_TOUCH = 2 };

/* Waits for a segment that is handed over to this process, or that an earlier process of its name
 * has left. Returns 1 if there is one, and 0 if there is none within the time. */
int aquifer_segment_receive(aquifer_process *process, int pulling, uint64_t timeout_ms,
                            aquifer_segment **segment);

/* What happens to a process. */
typedef struct aquifer_event {
    aquifer_segment *segment; /* a segment that was handed over, or NULL: another process wants one */
    uint64_t id;              /* the number of the segment */
    char process[72];         /* the name of the process that wants it */
} aquifer_event;

/* As aquifer_segment_receive, but also returns 1 for a request to hand a segment over
 * (`aquifer segment move`): to connect and to transfer when the program can. */
int aquifer_process_next_event(aquifer_process *process, int pulling, uint64_t timeout_ms,
                               aquifer_event *event);

/* Restores a segment from its copies, as the last sync has written them: its host has died, or it
 * was lost with its agent. Waits until the cluster is sure of that, which is after the grace time
 * of that host. Returns 1; or 0 if a host still has it when the time is over.
 * -ENODATA: it was never synced. */
int aquifer_segment_restore(aquifer_process *process, uint64_t id, uint64_t timeout_ms,
                            aquifer_segment **segment);

/* Number, first address and length of a segment. */
uint64_t aquifer_segment_id(const aquifer_segment *segment);
void *aquifer_segment_address(const aquifer_segment *segment);
size_t aquifer_segment_bytes(const aquifer_segment *segment);

/* Prepares a hand-over to another process of the user: all that is slow. Replaces an earlier one.
 * On failure none is prepared. */
int aquifer_segment_connect(aquifer_segment *segment, const char *process);

/* Takes aquifer_segment_connect back. */
int aquifer_segment_abort(aquifer_segment *segment);

/* Hands the segment over, and consumes it. From the call on, each touch by this process is SIGSEGV.
 * -EAGAIN: the segment is still this process's, and was not consumed;
 * another error: whether it has arrived is found out; if not, this process receives it again. */
int aquifer_segment_transfer(aquifer_segment *segment);

/* Writes what has changed to `copies` memory nodes, as one consistent copy each: what no sync has
 * written is lost if this host dies. No thread writes to the segment meanwhile, and no call uses
 * it. On failure the copies of the last sync count. */
int aquifer_segment_sync(aquifer_segment *segment, unsigned copies);

/* Gives the segment the bytes again that the last sync has written, of this process or an earlier
 * owner. -ENODATA: there was none; on another failure the segment may be partly as it was. */
int aquifer_segment_revert(aquifer_segment *segment);

/* Gives the segment up, keeps its copies, and consumes it: then it is lost, and can be restored.
 * For segments of which pages are lost. On failure it is unmapped all the same. */
int aquifer_segment_give_up(aquifer_segment *segment);

/* As aquifer_segment_sync and then aquifer_segment_transfer. -EAGAIN if the sync fails, too. */
int aquifer_segment_sync_and_transfer(aquifer_segment *segment, unsigned copies);

/* Pulls the pages with these bytes, if they are elsewhere. */
int aquifer_segment_pull(aquifer_segment *segment, uint64_t offset, uint64_t bytes);

/* Waits until all pages are here. Then no other host has a part in the segment. */
int aquifer_segment_close(aquifer_segment *segment);

/* Gives up the pages that are elsewhere: touching one is SIGBUS from now on, at any later owner as
 * well. Then no other host has a part in the segment. */
int aquifer_segment_discard(aquifer_segment *segment);

/* Frees the segment with its copies, and consumes it. */
int aquifer_segment_deallocate(aquifer_segment *segment);

/* A segment that a process of this host owns. */
typedef struct aquifer_segment_status {
    uint64_t id;
    uint64_t address;
    uint64_t bytes;
    uint64_t missing_bytes; /* of pages that are elsewhere */
    char process[72];       /* the name of its process, which may have ended */
} aquifer_segment_status;

/* The user's segments on this host: stores at most `count`, and returns how many there are. */
int aquifer_segment_list(aquifer_process *process, aquifer_segment_status *list, size_t count);

#ifdef __cplusplus
}
#endif

#endif
