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
 * The owner accesses plain memory. A page is missing while its bytes are at another host. A forked
 * child has no access to the segments of its parent.
 *
 * A function that returns an int returns a negative errno on failure, and aquifer_error() of
 * aquifer.h a text. Each function can return these:
 * -EINVAL: an argument is a null pointer, or not UTF-8;
 * -EACCES: the call has failed; the text has the reason;
 * -ENOMEM: the segment cannot be mapped;
 * -ENOTCONN: no agent answers;
 * -EPIPE: the agent has ended, and no other agent took over within the grace time;
 * -EIO: the agent has sent an invalid answer;
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

/* Opens this process under a name of 1 to 64 characters a-z, A-Z, 0-9 and ._-, which no other
 * process of the user has. A process has one name. `socket` is as for aquifer_open. Returns NULL on
 * failure. */
aquifer_process *aquifer_process_open(const char *socket, const char *name);

/* Closes the name. The next process of this name receives the segments that this one owns. Ignores
 * NULL. -EBUSY: a segment was not consumed. */
int aquifer_process_close(aquifer_process *process);

/* Allocates a segment of `bytes` zero bytes, a multiple of 4096. No other segment of the user may
 * have the number `id`. */
int aquifer_segment_allocate(aquifer_process *process, uint64_t id, uint64_t bytes,
                             aquifer_segment **segment);

/* Selects when missing pages are pulled: on touch and ahead of it; or only by aquifer_segment_pull,
 * where a touch of a missing page raises SIGBUS; or on touch only. */
enum { AQUIFER_PULL_AHEAD = 0, AQUIFER_PULL_EXPLICIT = 1, AQUIFER_PULL_ON_TOUCH = 2 };

/* Waits for a segment that is handed over to this process, or that an earlier process of its name
 * has left. Returns 1 if a segment has arrived, and 0 after the timeout. */
int aquifer_segment_receive(aquifer_process *process, int pulling, uint64_t timeout_ms,
                            aquifer_segment **segment);

/* An event for a process: a segment has arrived, or another process requests one. */
typedef struct aquifer_event {
    aquifer_segment *segment; /* the segment that has arrived, or NULL for a request */
    uint64_t id;              /* the number of the segment */
    char process[72];         /* the name of the process that requests it */
} aquifer_event;

/* Waits for a segment like aquifer_segment_receive, or for a request to hand a segment over
 * (`aquifer segment move`). The program should then call aquifer_segment_connect and
 * aquifer_segment_transfer when it can. */
int aquifer_process_next_event(aquifer_process *process, int pulling, uint64_t timeout_ms,
                               aquifer_event *event);

/* Restores a lost segment, whose host or agent has ended, from the copies of the last sync. Waits
 * for the end of that host's grace time. Returns 1, or 0 if a host still has the segment after the
 * timeout.
 * -ENODATA: the segment was never synced. */
int aquifer_segment_restore(aquifer_process *process, uint64_t id, uint64_t timeout_ms,
                            aquifer_segment **segment);

/* Return the number, the first address and the length in bytes of a segment. */
uint64_t aquifer_segment_id(const aquifer_segment *segment);
void *aquifer_segment_address(const aquifer_segment *segment);
size_t aquifer_segment_bytes(const aquifer_segment *segment);

/* Prepares a hand-over to another process of the user, so that aquifer_segment_transfer is fast.
 * Replaces an earlier one. On failure no hand-over is prepared. */
int aquifer_segment_connect(aquifer_segment *segment, const char *process);

/* Cancels aquifer_segment_connect. */
int aquifer_segment_abort(aquifer_segment *segment);

/* Hands the segment over, and consumes it. From the call on, each touch by this process raises
 * SIGSEGV.
 * -EAGAIN: the process still owns the segment, and it was not consumed;
 * another error: the agent determines whether the segment has arrived; if not, this process
 * receives it again. */
int aquifer_segment_transfer(aquifer_segment *segment);

/* Writes the changed bytes to `copies` memory nodes, each of which then has a consistent copy. If
 * this host dies, changes after the last sync are lost. During the call, no thread may write to the
 * segment, and no other call may use it. On failure the copies of the last sync stay in effect. */
int aquifer_segment_sync(aquifer_segment *segment, unsigned copies);

/* Restores the bytes that the last sync of this process or an earlier owner has written.
 * -ENODATA: the segment was never synced. On another failure, the bytes may be restored in part. */
int aquifer_segment_revert(aquifer_segment *segment);

/* Releases the segment, keeps its copies, and consumes it. Then it can be restored from the copies.
 * Useful for a segment with lost pages. The segment is unmapped even on failure. */
int aquifer_segment_give_up(aquifer_segment *segment);

/* Calls aquifer_segment_sync and then aquifer_segment_transfer. Also returns -EAGAIN if the sync
 * fails. */
int aquifer_segment_sync_and_transfer(aquifer_segment *segment, unsigned copies);

/* Pulls the missing pages of a range of bytes. */
int aquifer_segment_pull(aquifer_segment *segment, uint64_t offset, uint64_t bytes);

/* Pulls all missing pages, and waits for them. Then the segment needs no other host. */
int aquifer_segment_close(aquifer_segment *segment);

/* Discards all missing pages, so that the segment needs no other host. From now on, a touch of such
 * a page raises SIGBUS, also at later owners. */
int aquifer_segment_discard(aquifer_segment *segment);

/* Frees the segment with its copies, and consumes it. */
int aquifer_segment_deallocate(aquifer_segment *segment);

/* A segment that a process of this host owns. */
typedef struct aquifer_segment_status {
    uint64_t id;
    uint64_t address;
    uint64_t bytes;
    uint64_t missing_bytes; /* bytes of missing pages */
    char process[72];       /* the name of its process, which may have ended */
} aquifer_segment_status;

/* Lists the user's segments on this host: stores at most `count`, and returns the number of all. */
int aquifer_segment_list(aquifer_process *process, aquifer_segment_status *list, size_t count);

#ifdef __cplusplus
}
#endif

#endif
