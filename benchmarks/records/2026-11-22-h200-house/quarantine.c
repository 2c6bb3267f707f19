#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <fcntl.h>
#include <malloc.h>
#include <execinfo.h>
#include <pthread.h>
extern void __libc_free(void *);
#define N (1<<16)
#define FRAMES 14
struct e { unsigned char *p; unsigned size; int n; void *bt[FRAMES]; };
static struct e ring[N]; static unsigned long head;
static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
static __thread int busy;
static void report(struct e *x, unsigned at) {
  char name[64]; snprintf(name, sizeof name, "/tmp/found.%d", getpid());
  int fd = open(name, O_CREAT|O_APPEND|O_WRONLY, 0644); char line[400];
  int k = snprintf(line, sizeof line, "WRITE AFTER FREE size %u at offset %u pid %d:", x->size, at, getpid());
  for (unsigned i = at & ~7u; i < x->size && i < (at & ~7u) + 48; i++) k += snprintf(line + k, sizeof line - k, " %02x", x->p[i]);
  line[k++] = '\n'; if (write(fd, line, k)) {}
  backtrace_symbols_fd(x->bt, x->n, fd); close(fd);
}
static int bad(struct e *x) { 
  for (unsigned i = 0; i < x->size; i++) if (x->p[i] != 0xDB) return (int)i; return -1; }
__attribute__((constructor)) static void warm(void) { busy = 1; void *b[2]; backtrace(b, 2); busy = 0; }
void free(void *p) {
  if (!p) return;
  if (busy) { __libc_free(p); return; }
  size_t size = malloc_usable_size(p);
  if (size > 1100) { __libc_free(p); return; }
  busy = 1;
  struct e x = { p, (unsigned)size, 0 };
  memset(p, 0xDB, size);
  x.n = backtrace(x.bt, FRAMES);
  pthread_mutex_lock(&m);
  struct e *slot = &ring[head++ % N], old = *slot; *slot = x;
  int scan = head % (N / 2) == 0;
  if (scan) for (int i = 0; i < N; i++) if (ring[i].p) { int b = bad(&ring[i]); if (b >= 0) { report(&ring[i], b); memset(ring[i].p, 0xDB, ring[i].size); } }
  pthread_mutex_unlock(&m);
  if (old.p) { int b = bad(&old); if (b >= 0) report(&old, b); __libc_free(old.p); }
  busy = 0;
}
