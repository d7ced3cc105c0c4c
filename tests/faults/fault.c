/* A layer between a process and its C library, for tests: it counts the calls that change files below a folder, and
 * ends the process, or fails a call, at a number that the test has asked for.
 *
 * Load it with LD_PRELOAD. It does nothing until `fault_arm` is called, which a process does after it was forked.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum { NEVER = 'n', KILL = 'k', TORN = 't', ONCE = 'o', FROM_HERE = 's' };

static char prefix[4096];
static int log_file = -1;
static long count, at;
static char kind = NEVER;

/* Begins to count. `kind_of_fault` is one of the above: no fault; the process dies before call `at`, or after half of
 * that call if it writes; the disk is full for that call alone, or for it and all later ones. */
void fault_arm(const char *folder, const char *log, long at_call, char kind_of_fault) {
  prefix[0] = 0;
  count = 0;
  at = at_call;
  kind = kind_of_fault;
  if (log_file >= 0) close(log_file);
  log_file = log[0] ? REAL(open)(log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0644) : -1;
  snprintf(prefix, sizeof prefix, "%s", folder);
}

long fault_count(void) { return count; }

static int is_below(const char *path) {
  size_t size = strlen(prefix);
  return size && path && !strncmp(path, prefix, size);
}

static int find(int descriptor, char *path, size_t size) {
  char link[64];
  if (!prefix[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, size - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* Counts a call; whether it must fail. `*half` is set where a call that writes is to be cut in two. */
static int hit(const char *call, const char *path, int *half) {
  long number = __sync_add_and_fetch(&count, 1);
  if (log_file >= 0) {
    char line[4300];
    int size = snprintf(line, sizeof line, "%s %s\n", call, path);
    REAL(write)(log_file, line, size);
  }
  if (kind == KILL && number == at) die();
  if (kind == TORN && number == at) {
    if (!half) die();
    *half = 1;
  }
  if ((kind == ONCE && number == at) || (kind == FROM_HERE && number >= at)) {
    errno = ENOSPC;
    return 1;
  }
  return 0;
}

#define WRITES(name, parameters, whole, part)                     \
  ssize_t name parameters {                                       \
    char path[4096];                                              \
    int half = 0;                                                 \
    if (find(descriptor, path, sizeof path)) {                    \
      if (hit(#name, path, &half)) return -1;                     \
      if (half) {                                                 \
        REAL(name) part;                                          \
        die();                                                    \
      }                                                           \
    }                                                             \
    return REAL(name) whole;                                      \
  }
WRITES(write, (int descriptor, const void *data, size_t size), (descriptor, data, size), (descriptor, data, size / 2))
WRITES(pwrite, (int descriptor, const void *data, size_t size, off_t offset), (descriptor, data, size, offset),
       (descriptor, data, size / 2, offset))
WRITES(pwrite64, (int descriptor, const void *data, size_t size, off64_t offset), (descriptor, data, size, offset),
       (descriptor, data, size / 2, offset))
WRITES(writev, (int descriptor, const struct iovec *parts, int number), (descriptor, parts, number),
       (descriptor, parts, number / 2))

#define CHANGES(name, parameters, arguments)                                           \
  int name parameters {                                                                \
    char path[4096];                                                                   \
    if (find(descriptor, path, sizeof path) && hit(#name, path, 0)) return -1;         \
    return REAL(name) arguments;                                                       \
  }
CHANGES(fsync, (int descriptor), (descriptor))
CHANGES(fdatasync, (int descriptor), (descriptor))
CHANGES(ftruncate, (int descriptor, off_t size), (descriptor, size))
CHANGES(ftruncate64, (int descriptor, off64_t size), (descriptor, size))
CHANGES(fallocate, (int descriptor, int mode, off_t offset, off_t size), (descriptor, mode, offset, size))

int rename(const char *from, const char *to) {
  if (is_below(from) && hit("rename", to, 0)) return -1;
  return REAL(rename)(from, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
  if (is_below(from) && hit("renameat2", to, 0)) return -1;
  return REAL(renameat2)(from_folder, from, to_folder, to, flags);
}

int mkdir(const char *path, mode_t mode) {
  if (is_below(path) && hit("mkdir", path, 0)) return -1;
  return REAL(mkdir)(path, mode);
}

/* What removes needs no room: it is counted and may be where the process dies, but does not fail. */
static void removes(const char *call, int folder, const char *path) {
  char whole[8300], place[4096];
  if (path[0] == '/') {
    if (is_below(path)) hit(call, path, 0);
  } else if (folder != AT_FDCWD && find(folder, place, sizeof place)) {
    snprintf(whole, sizeof whole, "%s/%s", place, path);
    hit(call, whole, 0);
  }
}

int unlink(const char *path) {
  removes("unlink", AT_FDCWD, path);
  return REAL(unlink)(path);
}

int rmdir(const char *path) {
  removes("rmdir", AT_FDCWD, path);
  return REAL(rmdir)(path);
}

int unlinkat(int folder, const char *path, int flags) {
  removes("unlinkat", folder, path);
  return REAL(unlinkat)(folder, path, flags);
}

static mode_t mode_of(int flags, va_list rest) {
  return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name)                                                                            \
  int name(const char *path, int flags, ...) {                                                 \
    va_list rest;                                                                              \
    va_start(rest, flags);                                                                     \
    mode_t mode = mode_of(flags, rest);                                                        \
    va_end(rest);                                                                              \
    if (flags & (O_CREAT | O_TRUNC) && is_below(path) && hit("open", path, 0)) return -1;      \
    return REAL(name)(path, flags, mode);                                                      \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                         \
  int name(int folder, const char *path, int flags, ...) {                                     \
    va_list rest;                                                                              \
    va_start(rest, flags);                                                                     \
    mode_t mode = mode_of(flags, rest);                                                        \
    va_end(rest);                                                                              \
    if (flags & (O_CREAT | O_TRUNC) && is_below(path) && hit("open", path, 0)) return -1;      \
    return REAL(name)(folder, path, flags, mode);                                              \
  }
OPENS_AT(openat)
OPENS_AT(openat64)
