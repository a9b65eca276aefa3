/* Preloaded: files below WITHOUT_LOCKS_AT cannot be locked by the calls that WITHOUT_LOCKS_CALLS names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static int is_refused(int fd, const char *call) {
    const char *directory = getenv("WITHOUT_LOCKS_AT"), *calls = getenv("WITHOUT_LOCKS_CALLS");
    char link[64], path[4096];
    if (!directory || !calls || !strstr(calls, call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strncmp(path, directory, strlen(directory)) == 0;
}

int flock(int fd, int operation) {
    int (*real)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    if (is_refused(fd, "flock")) {
        errno = ENOLCK;
        return -1;
    }
    return real(fd, operation);
}

static int control(const char *name, int fd, int command, void *argument) {
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
    if ((command == F_SETLK || command == F_SETLKW) && is_refused(fd, "fcntl")) {
        errno = ENOLCK;
        return -1;
    }
    return real(fd, command, argument);
}

#define CONTROL(name)                                \
    int name(int fd, int command, ...) {             \
        va_list arguments;                           \
        va_start(arguments, command);                \
        void *argument = va_arg(arguments, void *);  \
        va_end(arguments);                           \
        return control(#name, fd, command, argument); \
    }

CONTROL(fcntl)
CONTROL(fcntl64)
