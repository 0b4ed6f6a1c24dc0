/* Makes chosen calls on files whose path contains a text fail, on demand.
 *
 * Preloaded into a child process, which arms it through fault_arm(): let `skip` calls of the
 * kinds in `kinds` pass, then fail `times` of them with `code`; 0 kills the process there. With
 * `partly` a write that is to fail first writes half of its bytes. fault_hits() says how many calls have failed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, TRUNCATE = 4 };

static char part_of_path[256];
static int kinds, skip, times, code, partly, hits;

void fault_arm(const char *part, int kinds_, int skip_, int times_, int code_, int partly_)
{
    strncpy(part_of_path, part, sizeof part_of_path - 1);
    kinds = kinds_, skip = skip_, times = times_, code = code_, partly = partly_, hits = 0;
}

int fault_hits(void) { return hits; }

static int due(int fd, int kind)
{
    char link[64], path[4096];
    ssize_t length;

    if (!(kinds & kind) || times <= 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    if (!strstr(path, part_of_path) || skip-- > 0)
        return 0;
    times--, hits++;
    return 1;
}

static void fail(void)
{
    if (!code)
        raise(SIGKILL);
    errno = code;
}

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static ssize_t fail_write(int fd, const void *bytes, size_t count, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) = next("pwrite64");
    if (partly)
        real(fd, bytes, count / 2, at);
    fail();
    return -1;
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off_t at)
{
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (due(fd, WRITE))
        return fail_write(fd, bytes, count, at);
    if (!real)
        real = next("pwrite64");
    return real(fd, bytes, count, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) { return pwrite64(fd, bytes, count, at); }

static int sync_or_fail(int fd, const char *name)
{
    int (*real)(int) = next(name);
    if (due(fd, SYNC)) {
        fail();
        return -1;
    }
    return real(fd);
}

int fsync(int fd) { return sync_or_fail(fd, "fsync"); }
int fdatasync(int fd) { return sync_or_fail(fd, "fdatasync"); }

int ftruncate64(int fd, off64_t length)
{
    int (*real)(int, off64_t) = next("ftruncate64");
    if (due(fd, TRUNCATE)) {
        fail();
        return -1;
    }
    return real(fd, length);
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }
