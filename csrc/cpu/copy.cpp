// nontemporal_copy: see core/functions.h.
#include "isa.h"

#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace zf::cpu::ZF_ISA {

static const int64_t LINE = 64;        // bytes of a cache line
static const int64_t GRAIN = 1 << 17;  // bytes, whole lines: what one thread does at least

#if defined(__x86_64__)
static void copy_lines(const char* source, char* out, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += sizeof(__m128i)) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at), part);
  }
  _mm_sfence();  // these stores are done before any that follow, such as that of a barrier's counter
}
#else
static void copy_lines(const char* source, char* out, int64_t bytes) { std::memcpy(out, source, bytes); }
#endif

void nontemporal_copy(const void* source, void* out, int64_t bytes) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(out);
  int64_t before = -reinterpret_cast<intptr_t>(to) & (LINE - 1);  // bytes up to the start of a line
  if (before > bytes) before = bytes;
  const int64_t lines = (bytes - before) / LINE * LINE, end = before + lines;
  if (before != 0) std::memcpy(to, from, before);
  auto range = [=](int64_t low, int64_t high) { copy_lines(from + before + low, to + before + low, high - low); };
  parallel_for(lines, GRAIN, range);
  if (end != bytes) std::memcpy(to + end, from + end, bytes - end);
}

}  // namespace zf::cpu::ZF_ISA
