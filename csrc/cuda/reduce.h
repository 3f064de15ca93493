// Reductions within a block, always in the same order: a GPU gives the same bits every time.
#pragma once

#include "launch.h"

namespace zf::cuda {

constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr int MANY_THREADS = 4 * THREADS;  // for one block that combines what many others have found

struct Add {
  __device__ __forceinline__ double operator()(double a, double b) const { return a + b; }
};

struct Least {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

struct Most {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// All lanes must call it, and all get the result.
template <class T, class Combine>
__device__ __forceinline__ T warp_reduce(T x, Combine combine) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  return x;
}

// All threads of the block must call it, and all get the result. Adding `none` changes nothing.
template <int threads, class T, class Combine>
__device__ __forceinline__ T block_reduce(T x, T none, Combine combine) {
  constexpr int WARPS = threads / WARP;
  static_assert(threads % WARP == 0 && WARPS <= WARP, "whole warps, and one of them combines all");
  using PerWarp = T[WARPS];
  ZF_SHARED(PerWarp, partial);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  x = warp_reduce(x, combine);
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = warp_reduce(lane < WARPS ? partial[lane] : none, combine);
  __syncthreads();  // the next call writes there again
  return x;
}

template <int threads = THREADS>
__device__ __forceinline__ double block_sum(double x) {
  return block_reduce<threads>(x, 0.0, Add{});
}

// fp64 is slow on some GPUs. So a few squares are added up in fp32, unless they are too large or small for it.
template <int N>
__device__ __forceinline__ double sum_of_squares(const float (&x)[N]) {
  float rough = 0;
  for (int j = 0; j < N; ++j) rough += x[j] * x[j];
  if (rough > 1e-30f && rough < 1e30f) return rough;
  double exact = 0;
  for (int j = 0; j < N; ++j) exact += double(x[j]) * double(x[j]);
  return exact;
}

}  // namespace zf::cuda
