#include "crc32.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zf::io {

#if defined(__x86_64__)

#define ZF_CLMUL __attribute__((target("pclmul,sse4.1")))

// Each constant is x^n modulo the polynomial of CRC-32, in reversed order of bits, as in "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction" (Gopal and others, 2009): n = 512 + 64 and 512, then 128 + 64 and
// 128, then 64. The last pair are the polynomial and its reciprocal.
alignas(16) static const uint64_t BY_512[] = {0x0154442bd4, 0x01c6e41596};
alignas(16) static const uint64_t BY_128[] = {0x01751997d0, 0x00ccaa009e};
alignas(16) static const uint64_t BY_64[] = {0x0163cd6124, 0};
alignas(16) static const uint64_t REDUCE[] = {0x01db710641, 0x01f7011641};

bool has_crc32() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

ZF_CLMUL static inline __m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// `sum` moved on by as many bits as `by` stands for, with `next` added.
ZF_CLMUL static inline __m128i fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Of at least 64 bytes; what is left of them at the end, fewer than 16, is not in it.
ZF_CLMUL static uint32_t of_blocks(uint32_t sum, const unsigned char*& data, int64_t& bytes) {
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int(sum)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  __m128i by = load(BY_512);
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {  // four sums hide each other's latency
    a = fold(a, by, load(data));
    b = fold(b, by, load(data + 16));
    c = fold(c, by, load(data + 32));
    d = fold(d, by, load(data + 48));
  }
  by = load(BY_128);
  a = fold(fold(fold(a, by, b), by, c), by, d);
  for (; bytes >= 16; data += 16, bytes -= 16) a = fold(a, by, load(data));
  // 128 bits to 64, and by Barrett's reduction to 32.
  const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), load(BY_64), 0x00));
  b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), load(REDUCE), 0x10), low);
  a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, load(REDUCE), 0x00));
  return uint32_t(_mm_extract_epi32(a, 1));
}

uint32_t crc32(uint32_t before, const unsigned char* data, int64_t bytes) {
  uint32_t sum = ~before;
  if (bytes >= 64) sum = of_blocks(sum, data, bytes);
  for (; bytes > 0; ++data, --bytes) {
    sum ^= *data;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (0xedb88320u & (0u - (sum & 1u)));
  }
  return ~sum;
}

#else

bool has_crc32() { return false; }
uint32_t crc32(uint32_t, const unsigned char*, int64_t) { return 0; }

#endif

}  // namespace zf::io
