// What zero_full/kernels/files.py and crc32.py call through ctypes.
//
// These are not torch operators. A transfer outlives the call that starts it and changes memory behind torch's
// back, which no schema can say: a dispatch mode, a fake tensor or a compiler may run an operator later, twice or
// not at all. ctypes lets go of the interpreter's lock as well, and hands errno over as a number.
#include <exception>

#include "io/block_io.h"
#include "io/crc32.h"

#define ZF_EXPORT extern "C" __attribute__((visibility("default")))

using zf::io::Failure;
using zf::io::Pool;
using zf::io::Span;

// Null if the system gives no more threads or memory.
ZF_EXPORT Pool* zf_io_open(int threads) {
  try {
    return new Pool(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

ZF_EXPORT int64_t zf_io_start(Pool* pool, const Span* spans, int count, int64_t block, int write) {
  return pool->start(spans, count, block, write != 0);
}

ZF_EXPORT int zf_io_wait(Pool* pool, int64_t number, int milliseconds, Failure* first) {
  return pool->wait(number, milliseconds, first);
}

ZF_EXPORT void zf_io_forget(Pool* pool, int64_t number) { pool->forget(number); }

// The closed pool, a few hundred bytes, is never freed: while the process ends, a daemon thread of Python may
// still be waiting in it or start something.
ZF_EXPORT void zf_io_close(Pool* pool) { pool->close(); }

ZF_EXPORT int zf_has_crc32() { return zf::io::has_crc32(); }

ZF_EXPORT uint32_t zf_crc32(uint32_t before, const void* data, int64_t bytes) {
  return zf::io::crc32(before, static_cast<const unsigned char*>(data), bytes);
}
