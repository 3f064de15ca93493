// What both sides share: number types, and how to move between them and fp32.
//
// Everything here is plain scalar code. The CPU's compiler makes vectors of it, nvcc makes threads of it, so a
// formula is written once. Nothing may contract a multiplication and an addition into one rounding (the builder
// passes -ffp-contract=off and -fmad=false): then every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

// Has the processor instructions that round two numbers to 16 bits?
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define ZF_ROUNDS_TWO 1
#else
#define ZF_ROUNDS_TWO 0
#endif

#if defined(__CUDACC__)
#define ZF_HD __host__ __device__ __forceinline__
#else
#define ZF_HD inline __attribute__((always_inline))
#endif

namespace zf {

enum class Type : int { none, f32, bf16, f16 };

struct bf16 {
  static constexpr bool has_range_of_f32 = true;
  uint16_t bits;
};
struct f16 {
  static constexpr bool has_range_of_f32 = false;
  uint16_t bits;
};
struct nothing {};  // in the place of an output that nobody wants

ZF_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZF_HD float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

ZF_HD bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

ZF_HD float to_f32(float x) { return x; }

ZF_HD float to_f32(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

#if ZF_ROUNDS_TWO
// Two numbers in 16 bits each, the first in the low half.
template <class T>
ZF_HD uint32_t round_two(float first, float second) {
  uint32_t both;
  if (T::has_range_of_f32) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  }
  return both;
}
#endif

// To the nearest, ties to even; NaN stays NaN, whatever rounding makes of its bits.
ZF_HD bf16 to_bf16(float x) {
#if ZF_ROUNDS_TWO
  return {uint16_t(round_two<bf16>(x, 0.0f))};
#endif
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {uint16_t(rounded | (x != x ? 0x7fc0u : 0u))};
}

// Without branches, so that it can be a vector. No number on the way is denormal, because a processor may have been
// told to take those for 0 (torch.set_flush_denormal): a denormal's bits count from 2**-14 on, which is taken off.
ZF_HD float to_f32(f16 x) {
#if defined(__CUDA_ARCH__)
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(x.bits));
  return found;
#endif
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t rest = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t denormal = bits_of(from_bits(rest + 0x38800000u) - from_bits(0x38800000u));
  const uint32_t finite = rest < 0x00800000u ? denormal : rest + 0x38000000u;
  const uint32_t special = rest >= 0x0f800000u ? 0x7f800000u : 0u;  // inf and NaN keep their exponent
  return from_bits(finite | special | sign);
}

// To the nearest, ties to even; too large becomes inf, NaN stays NaN, small becomes denormal.
ZF_HD f16 to_f16(float x) {
#if ZF_ROUNDS_TWO
  return {uint16_t(round_two<f16>(x, 0.0f))};
#endif
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  const uint32_t normal = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
  // Adding 0.5 puts a denormal's bits where they belong, rounded.
  const uint32_t denormal = bits_of(from_bits(size) + 0.5f) - 0x3f000000u;
  uint32_t result = size < 0x38800000u ? denormal : normal;
  result = size >= 0x477ff000u ? 0x7c00u : result;
  result = size > 0x7f800000u ? 0x7e00u : result;
  return {uint16_t(sign | result)};
}

ZF_HD void put(float& to, float x) { to = x; }
ZF_HD void put(bf16& to, float x) { to = to_bf16(x); }
ZF_HD void put(f16& to, float x) { to = to_f16(x); }
ZF_HD void put(nothing&, float) {}

// A master is what it was, unless somebody has written to its copy: where the copy is not what the master rounds
// to, the copy counts.
template <class Copy>
ZF_HD float unless_written(float master, Copy copy) {
  Copy rounded;
  put(rounded, master);
  return rounded.bits == copy.bits ? master : to_f32(copy);
}
ZF_HD float unless_written(float master, nothing) { return master; }

}  // namespace zf
