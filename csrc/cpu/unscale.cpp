// unscale_norm_check: see core/functions.h.
//
// Squares of finite fp32 numbers are far from fp64's limits, so a sum is finite exactly if all elements are.
// Only a stretch whose sum is not finite is looked through for the place.
#include "sums.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 15;
static const int BLOCK = 64;    // elements: whole vectors of every type, few enough to stay in registers
static const int PLACES = 4;    // walked in turn: one alone keeps too few lines of memory on their way

template <class T>
static inline void scale_one(T& x, float factor) {
  put(x, to_f32(x) * factor);
}

template <class T>
static inline void add_square(double& sum, T x) {
  const double value = to_f32(x);
  sum += value * value;
}

// In two loops, because a compiler makes better vectors of them.
template <class T, bool scale>
static inline void sweep_block(T* __restrict x, float factor, double* __restrict lanes) {
  if constexpr (scale) {
#pragma omp simd
    for (int i = 0; i < BLOCK; ++i) scale_one(x[i], factor);
  }
  for (int i = 0; i < BLOCK; i += LANES) {
#pragma omp simd
    for (int lane = 0; lane < LANES; ++lane) add_square(lanes[lane], x[i + lane]);
  }
}

template <class T, bool scale>
static double sweep(void* data, int64_t low, int64_t high, float factor) {
  T* __restrict x = static_cast<T*>(data);
  double lanes[LANES] = {};
  const int64_t part = (high - low) / PLACES / BLOCK * BLOCK;
  for (int64_t i = low; i < low + part; i += BLOCK) {
    for (int place = 0; place < PLACES; ++place) sweep_block<T, scale>(x + i + place * part, factor, lanes);
  }
  int64_t i = low + PLACES * part;
  for (int lane = 0; i < high; ++i, lane = (lane + 1) % LANES) {
    if constexpr (scale) scale_one(x[i], factor);
    add_square(lanes[lane], x[i]);
  }
  return in_total(lanes);
}

template <class T>
static int64_t first_not_finite(const void* data, int64_t low, int64_t high) {
  const T* x = static_cast<const T*>(data);
  while (low < high && is_finite(to_f32(x[low]))) ++low;
  return low;
}

struct Loops {
  double (*sweep)(void*, int64_t low, int64_t high, float factor);
  int64_t (*first_not_finite)(const void*, int64_t low, int64_t high);
};

template <class T>
static Loops loops_of(bool scale) {
  return {scale ? &sweep<T, true> : &sweep<T, false>, &first_not_finite<T>};
}

static Loops loops_for(Type type, bool scale) {
  if (type == Type::bf16) return loops_of<bf16>(scale);
  if (type == Type::f16) return loops_of<f16>(scale);
  return loops_of<float>(scale);
}

int64_t unscale_workspace(const Piece* pieces, int64_t count) { return places(pieces, count, GRAIN); }

void unscale_norm_check(
    const Piece* pieces, int64_t count, Type type, double factor, double* sum, int64_t* first, double* workspace,
    Stream) {
  const Loops loops = loops_for(type, factor != 1);
  for_stretches(pieces, count, GRAIN, [=](const Stretch& s) {
    workspace[s.place] = loops.sweep(pieces[s.part].data, s.low, s.high, float(factor));
  });
  *sum = 0;
  *first = -1;
  each_stretch(pieces, GRAIN, 0, all_elements(pieces, count), [=](const Stretch& s) {
    *sum += workspace[s.place];
    if (*first >= 0 || __builtin_isfinite(workspace[s.place])) return;
    *first = s.before + loops.first_not_finite(pieces[s.part].data, s.low, s.high);
  });
}

}  // namespace zf::cpu::ZF_ISA
