/* Makes every fsync and fdatasync of the process two milliseconds slower, as a slow disk is. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

static int slowed(const char *name, int descriptor) {
    struct timespec pause = {0, 2000000};
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    nanosleep(&pause, 0);
    return real(descriptor);
}

int fsync(int descriptor) { return slowed("fsync", descriptor); }

int fdatasync(int descriptor) { return slowed("fdatasync", descriptor); }
