/* libaquifer: extents of remote memory for programs in C, from the agent of this host.
 *
 *     aquifer_session *session = aquifer_open(NULL);
 *     aquifer_extent extent;
 *     if (!session || aquifer_allocate(session, 1 << 20, &extent))
 *         errx(1, "%s", aquifer_error());
 *     aquifer_write(session, &extent, 4096, "far away", 8);
 *
 * A function that returns an int returns 0 or a negative errno. After an error, aquifer_error()
 * returns a text. Each function lists its own errnos. Every function that has a session can also
 * return these:
 * -EINVAL: an argument is a null pointer, or a length or a structure is impossible;
 * -ECHILD: this process is a forked child of the process that opened the session;
 * -EPIPE: the session has ended, or no agent took over from an agent that ended.
 *
 * All functions are thread-safe. Calls for one session are serialised, so each thread should have a
 * session of its own.
 * A session belongs to the process that opened it. If the agent is restarted, calls wait for the
 * next agent.
 */
#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Size of the largest extent. */
#define AQUIFER_EXTENT_BYTES_MAX (64ull << 30)

typedef struct aquifer_session aquifer_session;

/* An extent. The structure can be copied and passed to other programs of the same user, which can
 * read and write the extent in their sessions. */
typedef struct aquifer_extent {
    uint64_t addr;  /* address in the memory node's region */
    uint64_t bytes; /* size: 4 KiB * 2^k up to 2 MiB, or a multiple of 2 MiB */
    uint32_t key;   /* key that opens the extent to programs of its user */
    uint16_t node;  /* number of the memory node */
    uint16_t zero;  /* 0 */
} aquifer_extent;

/* Opens a session with the agent that listens at `socket`. If `socket` is NULL: with the agent that
 * AQUIFER_AGENT names, else with that in the folder that AQUIFER_STATE names, else with that of the
 * user's own cluster, else with that of all users.
 * Returns NULL on failure; aquifer_error() says why. */
aquifer_session *aquifer_open(const char *socket);

/* Frees all extents of a session and ends it. Ignores NULL. */
void aquifer_close(aquifer_session *session);

/* Allocate an extent of at least `bytes` bytes, 1 to AQUIFER_EXTENT_BYTES_MAX; or `count` extents,
 * or none if one allocation fails. A new extent contains zeros, or what its last owner of the same
 * user left there.
 * -EINVAL: invalid size;
 * -ENOMEM: no node has room, or the session holds the maximum number of extents;
 * -EDQUOT: the user's quota is used up;
 * -EIO: the agent failed, and its log has the reason. */
int aquifer_allocate(aquifer_session *session, uint64_t bytes, aquifer_extent *extent);
int aquifer_allocate_many(aquifer_session *session, uint64_t bytes, size_t count, aquifer_extent *extents);

/* Free extents that this session allocated. The next allocation may return the same extent with the
 * same key.
 * aquifer_free_many returns the first error, and frees the other extents nevertheless. If the
 * structure of one cannot be an extent, it frees none.
 * -EACCES: the session did not allocate the extent, or has freed it before;
 * -EIO: the agent failed, and its log has the reason. */
int aquifer_free(aquifer_session *session, const aquifer_extent *extent);
int aquifer_free_many(aquifer_session *session, const aquifer_extent *extents, size_t count);

/* Read from and write to an extent.
 * -EINVAL: the range is not inside the extent;
 * -EACCES: the extent was freed, or belongs to another user;
 * -EAGAIN: the session or the user has used too many wrong keys, so this key was not tried; a
 *   session may try one more in a second;
 * -EIO: the memory node is gone and the data is lost, or the agent failed. aquifer_error() says
 * which; if the agent failed, its log has the reason. */
int aquifer_read(aquifer_session *session, const aquifer_extent *extent, uint64_t offset,
                 void *out, size_t bytes);
int aquifer_write(aquifer_session *session, const aquifer_extent *extent, uint64_t offset,
                  const void *from, size_t bytes);

/* Carry out several reads or writes, faster than one by one. Jobs of one node are done in order.
 * The functions return the first error; the other jobs are done nevertheless. If a pointer is NULL,
 * or a structure cannot be an extent, no job is done.
 * -EINVAL, -EACCES, -EAGAIN, -EIO: as for aquifer_read and aquifer_write. */
typedef struct aquifer_read_job {
    aquifer_extent extent;
    uint64_t offset;
    void *out;
    size_t bytes;
} aquifer_read_job;
typedef struct aquifer_write_job {
    aquifer_extent extent;
    uint64_t offset;
    const void *from;
    size_t bytes;
} aquifer_write_job;
int aquifer_read_many(aquifer_session *session, const aquifer_read_job *jobs, size_t count);
int aquifer_write_many(aquifer_session *session, const aquifer_write_job *jobs, size_t count);

/* Statistics of a session since it was opened.
 * aquifer_get_statistics sends no request, so it also succeeds when the session has ended. */
typedef struct aquifer_statistics {
    uint64_t bytes;         /* size of the allocated extents */
    uint64_t allocated;     /* extents that were allocated */
    uint64_t freed;         /* extents that were freed; a section that is freed alone counts as one */
    uint64_t read_bytes;    /* bytes read by calls that succeeded */
    uint64_t written_bytes; /* bytes written by calls that succeeded */
    uint64_t requests;      /* requests to the agent */
    uint64_t sleeps;        /* times that the program slept because an answer took more than 50 us */
} aquifer_statistics;
int aquifer_get_statistics(aquifer_session *session, aquifer_statistics *statistics);

/* Returns the text of this thread's last error. Valid until the thread's next error. */
const char *aquifer_error(void);

#ifdef __cplusplus
}
#endif

#endif
