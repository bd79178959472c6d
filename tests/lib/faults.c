// Stands between a process and the calls of libc that change files, and makes the n-th of them fail
// or end the process. Loaded by LD_PRELOAD; tests/lib/faults.py says what for.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { kCount, kKill, kError, kFull };

static enum Kind kind;
static long at, seen;
static int counting;

void faults_begin(long n, int k) {
  at = n;
  kind = k;
  seen = 0;
  counting = 1;
}

long faults_end(void) {
  counting = 0;
  return seen;
}

static void end_process(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Whether this call fails. `takes`: whether a full disk makes it fail.
static int fails(int takes) {
  if (!counting) return 0;
  ++seen;
  if (kind == kKill && seen == at) end_process();
  if (kind == kError && seen == at) return 1;
  return kind == kFull && takes && seen >= at;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CHANGE(name, takes, parameters, ...)        \
  int name parameters {                             \
    if (fails(takes)) return errno = ENOSPC, -1;    \
    return REAL(name)(__VA_ARGS__);                 \
  }

CHANGE(fsync, 1, (int fd), fd)
CHANGE(fdatasync, 1, (int fd), fd)
CHANGE(rename, 1, (const char* a, const char* b), a, b)
CHANGE(renameat, 1, (int i, const char* a, int j, const char* b), i, a, j, b)
CHANGE(link, 1, (const char* a, const char* b), a, b)
CHANGE(symlink, 1, (const char* a, const char* b), a, b)
CHANGE(mkdir, 1, (const char* path, mode_t mode), path, mode)
CHANGE(mkdirat, 1, (int fd, const char* path, mode_t mode), fd, path, mode)
CHANGE(unlink, 0, (const char* path), path)
CHANGE(unlinkat, 0, (int fd, const char* path, int flags), fd, path, flags)
CHANGE(rmdir, 0, (const char* path), path)
CHANGE(chmod, 0, (const char* path, mode_t mode), path, mode)
CHANGE(fchmod, 0, (int fd, mode_t mode), fd, mode)
CHANGE(fchmodat, 0, (int fd, const char* path, mode_t mode, int flags), fd, path, mode, flags)
CHANGE(ftruncate, 1, (int fd, off_t size), fd, size)
CHANGE(ftruncate64, 1, (int fd, off64_t size), fd, size)

int flock(int fd, int operation) {
  if (fails(0)) return errno = ENOLCK, -1;
  return REAL(flock)(fd, operation);
}

static int changes(int flags) { return flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC); }

#define OPEN(name, parameters, ...)                                                 \
  int name parameters {                                                             \
    va_list rest;                                                                   \
    va_start(rest, flags);                                                          \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                       \
    va_end(rest);                                                                   \
    if (changes(flags) && fails(flags & O_CREAT)) return errno = ENOSPC, -1;        \
    return REAL(name)(__VA_ARGS__, flags, mode);                                    \
  }

OPEN(open, (const char* path, int flags, ...), path)
OPEN(open64, (const char* path, int flags, ...), path)
OPEN(openat, (int fd, const char* path, int flags, ...), fd, path)
OPEN(openat64, (int fd, const char* path, int flags, ...), fd, path)

static int is_file(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
}

ssize_t write(int fd, const void* data, size_t size) {
  if (!counting || !is_file(fd)) return REAL(write)(fd, data, size);
  if (fails(1)) return errno = ENOSPC, -1;
  if (kind == kKill && ++seen == at) {  // half of it
    if (REAL(write)(fd, data, size / 2) >= 0) end_process();
  }
  return REAL(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  if (is_file(fd) && fails(1)) return errno = ENOSPC, -1;
  return REAL(writev)(fd, parts, count);
}
