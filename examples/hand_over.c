/* One process writes an extent and sends its description through a pipe.
 * Another process of the same user reads the extent.
 *
 * The description is a struct aquifer_extent. Every process of the user that has it can read and
 * write the extent, until the session that allocated the extent frees it or ends. */

#include <aquifer.h>

#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char MESSAGE[] = "written by the parent, read by the child";

static aquifer_session *open_session(void)
{
    /* The agent that AQUIFER_AGENT names, or that of the user's own cluster. */
    aquifer_session *session = aquifer_open(NULL);
    if (!session)
        errx(1, "%s", aquifer_error());
    return session;
}

static int read_in_child(int pipe_fd)
{
    aquifer_extent extent;
    char text[sizeof MESSAGE];

    if (read(pipe_fd, &extent, sizeof extent) != sizeof extent)
        err(1, "read");
    /* A session belongs to one process: the child opens its own. */
    aquifer_session *session = open_session();
    if (aquifer_read(session, &extent, 0, text, sizeof text))
        errx(1, "%s", aquifer_error());
    if (memcmp(text, MESSAGE, sizeof text))
        errx(1, "the extent has other contents");
    printf("child: %s\n", text);
    aquifer_close(session);
    return 0;
}

int main(void)
{
    int pipe_fds[2], status;
    pid_t child;
    aquifer_extent extent;

    if (pipe(pipe_fds))
        err(1, "pipe");
    child = fork();
    if (child < 0)
        err(1, "fork");
    if (child == 0)
        exit(read_in_child(pipe_fds[0]));

    aquifer_session *session = open_session();
    if (aquifer_allocate(session, 4096, &extent) ||
        aquifer_write(session, &extent, 0, MESSAGE, sizeof MESSAGE))
        errx(1, "%s", aquifer_error());
    if (write(pipe_fds[1], &extent, sizeof extent) != sizeof extent)
        err(1, "write");
    if (waitpid(child, &status, 0) != child)
        err(1, "waitpid");
    if (aquifer_free(session, &extent))
        errx(1, "%s", aquifer_error());
    aquifer_close(session);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
