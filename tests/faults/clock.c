// SPDX-License-Identifier: Apache-2.0
// Moves the wall clock of every process that loads it (LD_PRELOAD) by the seconds in the file FAULT_CLOCK_FILE, from
// one moment to the next, as NTP or a person may. The monotonic clock stays, as it does then.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
  const char *path = getenv("FAULT_CLOCK_FILE");
  char text[32];
  if (!path) return 0;
  int handle = open(path, O_RDONLY | O_CLOEXEC);
  if (handle < 0) return 0;
  ssize_t size = read(handle, text, sizeof text - 1);
  close(handle);
  if (size <= 0) return 0;
  text[size] = 0;
  return atol(text);
}

int clock_gettime(clockid_t which, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(which, out);
  if (result == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += shift();
  return result;
}

int gettimeofday(struct timeval *out, void *zone) {
  (void)zone;
  struct timespec now;
  int result = clock_gettime(CLOCK_REALTIME, &now);
  if (result == 0 && out) {
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
  }
  return result;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
