// Blocks of files, read and written by a few threads that never wait for Python.
//
// Which file, which part of it goes past the page cache, and how a failure is put into words is decided in
// zero_full/kernels/files.py.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace zf::io {

// A stretch of memory and of a file. Where `file` (perhaps opened with O_DIRECT) cannot go on, `buffered` does.
struct Span {
  int file;
  int buffered;
  char* memory;
  int64_t bytes;
  int64_t offset;
};

constexpr int END_OF_FILE = -1;
constexpr int64_t CLOSED = -1, NO_MEMORY = -2;  // in the place of a transfer's number

struct Failure {
  int error;   // 0: none; errno; or END_OF_FILE, a read wanted more than there is
  int64_t at;  // where in the file
};

struct Transfer {
  bool write;
  int64_t unfinished;  // blocks
  Failure first;
};

class Pool {
 public:
  explicit Pool(int threads);

  // Returns at once, with the transfer's number, CLOSED or NO_MEMORY. Memory and files must stay until the transfer
  // is finished.
  int64_t start(const Span* spans, int count, int64_t block, bool write);

  // Whether the transfer finished within the time. It may be asked again until the transfer is forgotten.
  bool wait(int64_t number, int milliseconds, Failure* first);

  void forget(int64_t number);  // of a finished transfer, for which nobody waits

  void close();  // finishes what was started and ends the threads

 private:
  struct Block {
    Transfer* transfer;
    Span span;
  };

  int64_t enqueue(Transfer& transfer, const Span* spans, int count, int64_t block);
  void work();

  std::mutex mutex_;  // guards all that follows but the threads
  std::condition_variable work_;
  std::condition_variable finished_;
  std::deque<Block> queue_;
  std::map<int64_t, Transfer> transfers_;  // a map's elements stay where they are
  int64_t next_number_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zf::io
