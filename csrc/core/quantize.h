// Integers of 8 or 4 bits with a scale for each block: the formulas for one number, byte or block, and the layout
// of a payload. See [Note: blocks of integers] in reference.py.
#pragma once

#include <cmath>

#include "types.h"

namespace zf {

constexpr uint32_t NOT_FINITE = 0x7f800000u;

// A block's reach is the maximum of this, compared as integers: NaN is larger than inf, inf than all numbers.
ZF_HD uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffffu; }

ZF_HD int largest_integer(int bits) { return (1 << (bits - 1)) - 1; }

// What makes `largest` the largest integer of a block; 0 for zeros, NaN if a number is not finite.
ZF_HD float block_scale(uint32_t reach, int largest) {
  // Far from where numbers lose bits, and not so far that the largest integer comes back as inf.
  const float least = from_bits(0x00800000u);  // 2**-126
  const float most = float(double(from_bits(0x7f7fffffu)) / largest * (1 - 1.0 / (1 << 23)));
  const float scale = from_bits(reach) / float(largest);
  const float kept = scale < least ? least : scale > most ? most : scale;
  return reach == 0 ? 0.0f : reach >= NOT_FINITE ? from_bits(0x7fc00000u) : kept;
}

// To the nearest, ties to even; all 0 if the scale is 0 or NaN.
ZF_HD int8_t to_integer(float x, float scale) {
  const float rounded = rintf(x / scale);
  return int8_t(int(rounded == rounded ? rounded : 0.0f));
}

// The same without a division for each number, where that gives the same: an estimate of the quotient is made
// better by what it leaves over, and adding 1.5 * 2**23 rounds it. tests/kernels/test_divisions.py has tried every
// number that is near the middle of two integers, which is where it matters.
struct Divisor {
  float scale, inverse;
  bool usual;  // so far from the ends of fp32 that nothing on the way is rounded differently; not 0 or NaN
};

ZF_HD Divisor divisor_of(float scale) {
  const float least = from_bits(0x0f800000u), most = from_bits(0x6f800000u);  // 2**-96, 2**96
  return {scale, 1.0f / scale, scale >= least && scale <= most};
}

ZF_HD int8_t to_integer(float x, const Divisor& usual) {
  const float rough = x * usual.inverse;
  const float quotient = fmaf(fmaf(-rough, usual.scale, x), usual.inverse, rough);
  return int8_t(bits_of(quotient + 12582912.0f));
}

ZF_HD float from_integer(int8_t integer, float scale) { return float(integer) * scale; }

// Two integers of 4 bits to a byte, the first in the low half.
ZF_HD uint8_t pack_halves(int8_t low, int8_t high) { return uint8_t((low & 15) | (high & 15) << 4); }
ZF_HD int8_t low_half(uint8_t byte) { return int8_t(uint8_t(byte << 4)) >> 4; }
ZF_HD int8_t high_half(uint8_t byte) { return int8_t(byte) >> 4; }

// How many bytes the integers take; the scales follow, at any byte.
ZF_HD int64_t integer_bytes(int64_t numel, int bits) { return (numel * bits + 7) / 8; }

ZF_HD float load_scale(const uint8_t* scales, int64_t block) {
  float scale;
  memcpy(&scale, scales + 4 * block, sizeof scale);
  return scale;
}

ZF_HD void store_scale(uint8_t* scales, int64_t block, float scale) {
  memcpy(scales + 4 * block, &scale, sizeof scale);
}

}  // namespace zf
