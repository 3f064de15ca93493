// One bit a number with error feedback: the formulas for one element, and for a piece's scale.
#pragma once

#include <cmath>

#include "types.h"

namespace zf {

// Zero counts as plus, also -0; NaN as minus.
ZF_HD bool is_plus(float wanted) { return wanted >= 0; }

// Scale times sign. What is wanted minus this is the new error, in the padding, too, where the scale is 0.
ZF_HD float with_sign(float scale, bool plus) { return plus ? scale : -scale; }

// What an element adds to its piece's total.
ZF_HD double sign_weight(float wanted, bool l1) {
  const double x = wanted;
  return l1 ? fabs(x) : x * x;
}

// Of a piece of `numel` elements, 0 if there are none.
ZF_HD float sign_scale(double total, int64_t numel, bool l1) {
  const double mean = total / double(numel > 0 ? numel : 1);
  return float(l1 ? mean : sqrt(mean));
}

// How many rows a mean is over, and what divides by them: what a multiplication leaves over makes its result that of
// the division. tests/kernels/test_divisions.py has tried every number of bits for as many rows as `most`.
struct MeanOver {
  static constexpr int64_t most = 4096;

  float count, inverse;
  bool few;
};

inline MeanOver mean_over(int64_t rows) { return {float(rows), 1.0f / float(rows), rows <= MeanOver::most}; }

// Is nothing on the way to this total's mean so small or large that it is rounded differently?
ZF_HD bool is_usual(float total) {
  const uint32_t least = 0x21800000u, most = 0x71800000u;  // 2**-60, 2**100
  const uint32_t size = bits_of(total) & 0x7fffffffu;
  return size - least <= most - least || size == 0;
}

ZF_HD float mean_of_usual(float total, const MeanOver& over) {
  const float rough = total * over.inverse;
  return fmaf(fmaf(-rough, over.count, total), over.inverse, rough);
}

ZF_HD bool bit_of(const uint8_t* packed, int64_t i) { return packed[i / 8] >> (i % 8) & 1; }

}  // namespace zf
