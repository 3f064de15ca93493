#include "block_io.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>

namespace zf::io {

// Goes on after an interruption and after a part. What O_DIRECT leaves over or refuses is done without it: the end
// of a file is rarely aligned, some file systems accept the flag but not the block (EINVAL, EOPNOTSUPP), and some
// memory, such as a device's, cannot be pinned (EFAULT). EIO is the disk's: the page cache would only hide it.
static Failure transfer_block(Span span, bool write) {
  while (span.bytes > 0) {
    const ssize_t moved = write ? pwrite(span.file, span.memory, size_t(span.bytes), span.offset)
                                : pread(span.file, span.memory, size_t(span.bytes), span.offset);
    const int error = moved > 0 ? 0 : moved < 0 ? errno : write ? EIO : END_OF_FILE;
    if (error == EINTR) continue;
    const bool not_direct = error == EINVAL || error == EOPNOTSUPP || error == EFAULT;
    const bool refused = not_direct && span.file != span.buffered;
    if (error != 0 && !refused) return {error, span.offset};
    span.file = span.buffered;
    if (refused) continue;
    span.memory += moved;
    span.bytes -= moved;
    span.offset += moved;
  }
  return {0, 0};
}

Pool::Pool(int threads) {
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    close();  // a thread that is not joined would end the process
    throw;
  }
}

void Pool::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

int64_t Pool::start(const Span* spans, int count, int64_t block, bool write) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) return CLOSED;
  const int64_t number = next_number_++;
  int64_t blocks = 0;
  try {
    Transfer& transfer = transfers_[number];
    transfer = {write, 0, {0, 0}};
    blocks = enqueue(transfer, spans, count, block);
  } catch (const std::bad_alloc&) {  // none of its blocks has begun, because this thread has the lock
    const auto found = transfers_.find(number);
    if (found == transfers_.end()) return NO_MEMORY;
    while (!queue_.empty() && queue_.back().transfer == &found->second) queue_.pop_back();
    transfers_.erase(found);
    return NO_MEMORY;
  }
  lock.unlock();
  blocks == 1 ? work_.notify_one() : work_.notify_all();
  return number;
}

int64_t Pool::enqueue(Transfer& transfer, const Span* spans, int count, int64_t block) {
  for (const Span* span = spans; span != spans + count; ++span) {
    for (int64_t begin = 0; begin < span->bytes; begin += block) {
      const int64_t bytes = std::min(block, span->bytes - begin);
      const Span part = {span->file, span->buffered, span->memory + begin, bytes, span->offset + begin};
      queue_.push_back({&transfer, part});
      ++transfer.unfinished;
    }
  }
  return transfer.unfinished;
}

bool Pool::wait(int64_t number, int milliseconds, Failure* first) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = transfers_.find(number);
  if (found == transfers_.end()) {
    *first = {EINVAL, 0};
    return true;
  }
  const auto done = [&] { return found->second.unfinished == 0; };
  if (!finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), done)) return false;
  *first = found->second.first;
  return true;
}

void Pool::forget(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  transfers_.erase(number);
}

void Pool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Block block = queue_.front();
    queue_.pop_front();
    Transfer& transfer = *block.transfer;
    if (transfer.first.error == 0) {  // else the rest of it is not worth the time
      lock.unlock();
      const Failure failure = transfer_block(block.span, transfer.write);
      lock.lock();
      if (transfer.first.error == 0) transfer.first = failure;
    }
    if (--transfer.unfinished == 0) finished_.notify_all();
  }
}

}  // namespace zf::io
