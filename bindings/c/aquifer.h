/* libaquifer: memory of the cluster for programs in C, from the agent of this host.
 *
 *     aquifer_session *session = aquifer_open(NULL);
 *     aquifer_extent extent;
 *     if (!session || aquifer_allocate(session, 1 << 20, &extent))
 *         errx(1, "%s", aquifer_error());
 *     aquifer_write(session, &extent, 4096, "far away", 8);
 *
 * Functions return 0, or a negative errno; aquifer_error() then says in a sentence what happened. Any thread may call any of them;
 * calls of one session wait for each other, so threads that want speed have a session each. A session belongs to the process that opened
 * it: in a forked child it fails with -ECHILD. If the agent is restarted, calls wait for it.
 */
#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The largest extent, in bytes. */
#define AQUIFER_EXTENT_BYTES_MAX (64ull << 30)

typedef struct aquifer_session aquifer_session;

/* Memory of the cluster. It may be copied, and told to other programs of the same user. */
typedef struct aquifer_extent {
    uint64_t addr;  /* in the memory node's region */
    uint64_t bytes; /* 4 KiB * 2^k up to 2 MiB, then multiples of 2 MiB */
    uint32_t key;   /* opens it to programs of its user */
    uint16_t node;  /* the memory node's number */
    uint16_t zero;  /* 0 */
} aquifer_extent;

/* Open a session with the agent that listens at `socket`; NULL: the one that AQUIFER_AGENT names, or that of the user's own cluster.
 * NULL if there is none. */
aquifer_session *aquifer_open(const char *socket);

/* Give back all that the session has, and end it. NULL is fine. */
void aquifer_close(aquifer_session *session);

/* Take an extent of at least `bytes`, 1 to AQUIFER_EXTENT_BYTES_MAX; or `count` of them, all or none. They hold what their last owner, of the
 * same user, left there, else zeros. -ENOMEM: the pool is full; -EDQUOT: this user has as much as it may have; -EINVAL: no such size. */
int aquifer_allocate(aquifer_session *session, uint64_t bytes, aquifer_extent *extent);
int aquifer_allocate_many(aquifer_session *session, uint64_t bytes, size_t count, aquifer_extent *extents);

/* Give back what this session allocated. -EACCES: it did not, or has given it back before. The next allocation may be the same extent again,
 * by the same name. */
int aquifer_free(aquifer_session *session, const aquifer_extent *extent);
int aquifer_free_many(aquifer_session *session, const aquifer_extent *extents, size_t count);

/* Copy from and to an extent. -EIO: the memory node is gone, and what was there; -EACCES: it was given back, or is another user's;
 * -EINVAL: not inside the extent. */
int aquifer_read(aquifer_session *session, const aquifer_extent *extent, uint64_t offset, void *out, size_t bytes);
int aquifer_write(aquifer_session *session, const aquifer_extent *extent, uint64_t offset, const void *from, size_t bytes);

/* The same for several parts of any extents at once: faster than one by one. Each node's are done in this order; the first that fails is told, and the
 * others are done all the same. But if one has a null pointer, or what can be no extent, nothing is done. */
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

/* What a session has, and has done since it was opened. */
typedef struct aquifer_statistics {
    uint64_t bytes;         /* of the extents that it has */
    uint64_t allocated;     /* extents that it has taken */
    uint64_t freed;         /* extents that it has given back; a section of a larger one by itself counts as one */
    uint64_t read_bytes;    /* by calls that succeeded */
    uint64_t written_bytes; /* by calls that succeeded */
    uint64_t requests;      /* to the agent */
    uint64_t sleeps;        /* for an answer that did not come within some 50 us */
} aquifer_statistics;
int aquifer_get_statistics(aquifer_session *session, aquifer_statistics *statistics);

/* What happened in this thread's last call that failed. Valid until its next. */
const char *aquifer_error(void);

#ifdef __cplusplus
}
#endif

#endif
