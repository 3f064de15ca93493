// For tests/kernels/test_divisions.py: how often what is found without a division is not what a division gives.
#include "core/quantize.h"
#include "core/sign.h"

using namespace zf;

#define ZF_VISIBLE extern "C" __attribute__((visibility("default")))

// Integers of the numbers that are nearest to the middles between two, where a last bit decides. By every `step`-th
// of the scales from `first` on, counted through their bits; -1 if one is not usual.
ZF_VISIBLE int64_t wrong_near_middles(uint32_t first, uint32_t step, int64_t scales) {
  constexpr int NEAR = 3;  // numbers on each side
  int64_t wrong = 0;
  for (int64_t k = 0; k < scales; ++k) {
    const float scale = from_bits(uint32_t(first + k * step));
    const Divisor divisor = divisor_of(scale);
    if (!divisor.usual) return -1;
    int here = 0;
    for (int near = -NEAR; near <= NEAR; ++near) {
      for (int i = 0; i < 128; ++i) {
        const float x = from_bits(bits_of((float(i) + 0.5f) * scale) + uint32_t(near));
        here += to_integer(x, scale) != to_integer(x, divisor);
        here += to_integer(-x, scale) != to_integer(-x, divisor);
      }
    }
    wrong += here;
  }
  return wrong;
}

ZF_VISIBLE int64_t wrong_integers(const float* numbers, const float* scales, int64_t count) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Divisor divisor = divisor_of(scales[i]);
    wrong += divisor.usual && to_integer(numbers[i], scales[i]) != to_integer(numbers[i], divisor);
  }
  return wrong;
}

// Means of every `step`-th total from `first` on over so many rows.
ZF_VISIBLE int64_t wrong_means(uint32_t first, uint32_t step, int64_t totals, int64_t rows) {
  const MeanOver over = mean_over(rows);
  int64_t wrong = 0;
  for (int64_t k = 0; k < totals; ++k) {
    const float total = from_bits(uint32_t(first + k * step));
    wrong += bits_of(total / over.count) != bits_of(mean_of_usual(total, over));
  }
  return wrong;
}

ZF_VISIBLE bool usual_scale(float scale) { return divisor_of(scale).usual; }
ZF_VISIBLE bool usual_total(float total) { return is_usual(total); }
ZF_VISIBLE bool few_rows(int64_t rows) { return mean_over(rows).few; }
