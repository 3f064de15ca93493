// sum_and_divide: see core/functions.h.
#include "blocks.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 14;  // elements, whole blocks: what one thread does at least

template <class T>
static const T* term(const Terms& terms, int64_t number, int64_t at) {
  return static_cast<const T*>(terms.data[number]) + at;
}

template <class T>
static void add_two(const T* __restrict first, const T* __restrict second, float* __restrict total, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] = to_f32(first[i]) + to_f32(second[i]);
}

template <class T>
static void add(const T* __restrict more, float* __restrict total, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] += to_f32(more[i]);
}

template <class Out>
static void divide(const float* __restrict total, Out* __restrict out, int64_t count, float divisor) {
  for (int64_t i = 0; i < count; ++i) put(out[i], total[i] / divisor);
}

// `out` may be one of the terms, so it is written when a block of all terms has been read.
template <class T, class Out>
static void sum_range(const Terms& terms, Out* out, int64_t low, int64_t high, float divisor) {
  for_blocks(low, high, [=](int64_t at, int64_t count) {
    alignas(64) float total[BLOCK];
    add_two(term<T>(terms, 0, at), term<T>(terms, 1, at), total, count);
    for (int64_t number = 2; number < terms.count; ++number) add(term<T>(terms, number, at), total, count);
    divide(total, out + at, count, divisor);
  });
}

template <class T, class Out>
static void sum_all(const Terms& terms, void* out, int64_t numel, double divisor) {
  auto range = [=](int64_t low, int64_t high) {
    sum_range<T>(terms, static_cast<Out*>(out), low, high, float(divisor));
  };
  parallel_for(numel, GRAIN, range);
}

template <class T>
static void sum_into(const Terms& terms, void* out, Type type, int64_t numel, double divisor) {
  if (type == Type::bf16) return sum_all<T, bf16>(terms, out, numel, divisor);
  if (type == Type::f16) return sum_all<T, f16>(terms, out, numel, divisor);
  sum_all<T, float>(terms, out, numel, divisor);
}

void sum_and_divide(const Terms& terms, void* out, Type type, int64_t numel, double divisor) {
  if (terms.type == Type::bf16) return sum_into<bf16>(terms, out, type, numel, divisor);
  if (terms.type == Type::f16) return sum_into<f16>(terms, out, type, numel, divisor);
  sum_into<float>(terms, out, type, numel, divisor);
}

}  // namespace zf::cpu::ZF_ISA
