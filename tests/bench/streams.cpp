// The ceilings of kernels.py: what a kernel reads and writes, on the same threads, with next to no arithmetic.
//
// Memory answers faster when it is asked at several places at once. Who has several arrays does that anyway; who
// has one can walk through four parts of it in turn. So there are two ceilings for the latter.
#include <torch/csrc/stable/ops.h>

#include <cstdint>

#define ZF_EXPORT extern "C" __attribute__((visibility("default")))

static const int64_t GRAIN = 1 << 15;  // elements for a thread at least
static const int64_t BLOCK = 16;       // elements; n is a multiple

// `range(low, high)` for ranges that begin with a grain: as the kernels' are, see bind_cpu.cpp.
template <class Range>
static void on_all_threads(int64_t n, const Range& range) {
  torch::stable::parallel_for(0, (n + GRAIN - 1) / GRAIN, 1, [&](int64_t first, int64_t last) {
    range(first * GRAIN, last * GRAIN < n ? last * GRAIN : n);
  });
}

// `block(start)` for all blocks of a range: of whole grains, in so many parts in turn, and of the rest.
template <int places, class Block>
static inline void each_block(int64_t low, int64_t high, const Block& block) {
  const int64_t part = GRAIN / places;
  for (; low + GRAIN <= high; low += GRAIN) {
    for (int64_t start = low; start < low + part; start += BLOCK) {
      for (int place = 0; place < places; ++place) block(start + place * part);
    }
  }
  for (; low < high; low += BLOCK) block(low);
}

// adam_step's: three arrays of fp32 and one of 16 bits in place, one of 16 bits in. A factor of 1 leaves all
// numbers as they are, and of the copy no bit is kept, but the compiler does not know that.
ZF_EXPORT void zf_adam_streams(
    float* __restrict p, float* __restrict m, float* __restrict v, const uint16_t* __restrict grad,
    uint16_t* __restrict copy, float factor, uint16_t kept, int64_t n) {
  on_all_threads(n, [=](int64_t low, int64_t high) {
    each_block<1>(low, high, [=](int64_t start) {
#pragma omp simd
      for (int64_t i = start; i < start + BLOCK; ++i) {
        p[i] *= factor;
        m[i] *= factor;
        v[i] *= factor;
        copy[i] = (copy[i] & kept) | grad[i];
      }
    });
  });
}

// unscale_norm_check's: one array of fp32 in place.
template <int places>
static void scale(float* x, float factor, int64_t n) {
  on_all_threads(n, [=](int64_t low, int64_t high) {
    each_block<places>(low, high, [=](int64_t start) {
#pragma omp simd
      for (int64_t i = start; i < start + BLOCK; ++i) x[i] *= factor;
    });
  });
}

ZF_EXPORT void zf_scale_stream(float* x, float factor, int64_t n, int places) {
  places == 4 ? scale<4>(x, factor, n) : scale<1>(x, factor, n);
}

// The same for a factor of 1: one array of fp32 that is only read. Nobody wants `all`, but somebody could.
template <int places>
static uint32_t read(const uint32_t* x, int64_t n) {
  uint32_t all = 0;
  on_all_threads(n, [&](int64_t low, int64_t high) {
    uint32_t lanes[BLOCK] = {}, bits = 0;
    each_block<places>(low, high, [&](int64_t start) {
#pragma omp simd
      for (int64_t i = 0; i < BLOCK; ++i) lanes[i] |= x[start + i];
    });
    for (uint32_t lane : lanes) bits |= lane;
    __atomic_fetch_or(&all, bits, __ATOMIC_RELAXED);
  });
  return all;
}

ZF_EXPORT uint32_t zf_read_stream(const uint32_t* x, int64_t n, int places) {
  return places == 4 ? read<4>(x, n) : read<1>(x, n);
}
