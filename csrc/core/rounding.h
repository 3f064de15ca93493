// Stochastic rounding to bf16: a number becomes one of its two neighbours, the nearer one more often, so that on average
// it stays what it was.
//
// Chance is a function of a parameter's key, the step and the element's place in the parameter: whoever holds the
// element draws the same. It is made of 32-bit integers only, so every processor finds the same bits.
#pragma once

#include "ops.h"

namespace zf {

// The last part of MurmurHash3: each bit of x changes about half of the result's, and no two x have the same result.
ZF_HD uint32_t scrambled(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

// Of one parameter in one step.
struct Chance {
  uint32_t first, second;
};

ZF_HD Chance chance_of(uint64_t key, float step) {
  const uint32_t number = uint32_t(step);
  return {
      scrambled(uint32_t(key) ^ scrambled(number)),
      scrambled(uint32_t(key >> 32) + scrambled(number ^ 0x9e3779b9u)),
  };
}

// 32 bits for an element, whose place is `low` + 2**32 `high`: 16 for the master, then 16 for the first moment.
ZF_HD uint32_t draw(const Chance& chance, uint32_t low, uint32_t high) {
  return scrambled(scrambled(low ^ chance.first) + chance.second + high * 0x9e3779b9u);
}

// 32 more bits, 16 of them for the second moment.
ZF_HD uint32_t draw_again(const Chance& chance, uint32_t drawn) { return scrambled(drawn ^ chance.first); }

// In fp32, but with the bits of a bf16 number. Of `drawn` the lower 16 bits count; infinities and NaN stay.
ZF_HD float rounded_by(float x, uint32_t drawn) {
  const float rounded = from_bits((bits_of(x) + (drawn & 0xffffu)) & 0xffff0000u);
  return x != x ? x : rounded;
}

}  // namespace zf
