// The pool of csrc/io under stress and without memory, for tests/kernels/test_sanitizers.py: read and written are
// arrays, and every system call may be interrupted, cut short or refused.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sys/types.h>
#include <unistd.h>

namespace {

constexpr int DIRECT = 100, BUFFERED = 101;  // files
constexpr int64_t SIZE = 1 << 16;
char disk[SIZE];
int refusal = EFAULT;               // of O_DIRECT
thread_local int calls = 0;
thread_local int allocations = -1;  // how many this thread may still make; any number if negative

ssize_t answer(int file, size_t& bytes) {
  if (file == DIRECT) return errno = refusal, -1;
  if (++calls % 5 == 0) return errno = EINTR, -1;
  if (calls % 3 == 0) bytes = (bytes + 1) / 2;
  return ssize_t(bytes);
}

ssize_t checked_pwrite(int file, const void* from, size_t bytes, off_t at) {
  const ssize_t moved = answer(file, bytes);
  if (moved > 0) memcpy(disk + at, from, bytes);
  return moved;
}

ssize_t checked_pread(int file, void* to, size_t bytes, off_t at) {
  const ssize_t moved = answer(file, bytes);
  if (moved > 0) memcpy(to, disk + at, bytes);
  return moved;
}

}  // namespace

void* operator new(size_t size) {
  if (allocations == 0) throw std::bad_alloc();
  if (allocations > 0) --allocations;
  if (void* found = malloc(size)) return found;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }

#define pwrite checked_pwrite
#define pread checked_pread
#include "bind_io.cpp"
#include "io/block_io.cpp"
#include "io/crc32.cpp"

#include <cstdio>
#include <thread>

namespace {

void check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

Failure finish(Pool* pool, int64_t number) {
  Failure first{};
  while (!zf_io_wait(pool, number, 10, &first)) {
  }
  Failure again{};
  check(zf_io_wait(pool, number, 0, &again) && again.error == first.error, "a second answer");
  zf_io_forget(pool, number);
  return first;
}

// Each writes to its part of the disk and reads it back, again and again.
void use(Pool* pool, int me, int users) {
  const int64_t bytes = SIZE / users, begin = me * bytes;
  char* mine = new char[bytes];
  char* back = new char[bytes];
  for (int turn = 0; turn < 50; ++turn) {
    memset(mine, me * 50 + turn, bytes);
    const int file = turn % 2 ? DIRECT : BUFFERED;
    const Span out{file, BUFFERED, mine, bytes, begin}, in{file, BUFFERED, back, bytes, begin};
    check(finish(pool, zf_io_start(pool, &out, 1, 1000, 1)).error == 0, "a write");
    check(finish(pool, zf_io_start(pool, &in, 1, 700, 0)).error == 0, "a read");
    check(memcmp(mine, back, bytes) == 0, "what came back");
  }
  delete[] mine;
  delete[] back;
}

void stress() {
  Pool* pool = zf_io_open(3);
  std::thread users[4];
  for (int i = 0; i < 4; ++i) users[i] = std::thread(use, pool, i, 4);
  for (std::thread& user : users) user.join();
  char some[64] = {};
  const Span in{BUFFERED, BUFFERED, some, 64, 0};
  const int64_t last = zf_io_start(pool, &in, 1, 8, 0);
  zf_io_close(pool);
  check(finish(pool, last).error == 0, "what was started before the pool was closed");
  check(zf_io_start(pool, &in, 1, 8, 0) == zf::io::CLOSED, "a closed pool");
}

// Wherever memory ends, the call says so, and the pool goes on.
void without_memory() {
  Pool* pool = zf_io_open(2);
  static char some[20000];
  const Span spans[] = {{DIRECT, BUFFERED, some, 10000, 0}, {BUFFERED, BUFFERED, some + 10000, 10000, 10000}};
  int refused = 0;
  for (int least = 0;; ++least) {
    allocations = least;
    const int64_t number = zf_io_start(pool, spans, 2, 7, 1);  // thousands of blocks
    allocations = -1;
    if (number >= 0) {
      check(finish(pool, number).error == 0, "a write after memory had ended");
      break;
    }
    check(number == zf::io::NO_MEMORY, "the answer when memory ends");
    ++refused;
  }
  check(refused > 3, "memory that ends in several places");
  for (int least = 0; least < 8; ++least) {
    allocations = least;
    Pool* other = zf_io_open(3);
    allocations = -1;
    if (other != nullptr) zf_io_close(other);
  }
  for (int each : {EINVAL, EOPNOTSUPP}) {
    refusal = each;
    check(finish(pool, zf_io_start(pool, spans, 1, 7, 1)).error == 0, "a file that O_DIRECT does not suit");
  }
  refusal = EIO;
  check(finish(pool, zf_io_start(pool, spans, 1, 7, 1)).error == EIO, "an error that is no refusal");
  zf_io_close(pool);
}

}  // namespace

int main() {
  alarm(30);  // nothing here takes a second
  stress();
  without_memory();
  puts("done");
}
