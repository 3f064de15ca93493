// Walking over arrays in global memory, 16 bytes at a time where they allow it.
#pragma once

#include <type_traits>

#include "launch.h"

namespace zf::cuda {

// N elements that are loaded and stored at once. Their address must be a multiple of their size.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <class T>
__device__ __forceinline__ T* aligned(T* pointer) {
#if defined(ZF_EMULATE)
  if (uintptr_t(pointer) % alignof(T) != 0) emulated::fail("a pack's address is not a multiple of its size");
#endif
  return pointer;
}

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  if constexpr (std::is_same_v<T, nothing>) return {};
  return *aligned(reinterpret_cast<const Pack<T, N>*>(from));
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  *aligned(reinterpret_cast<Pack<T, N>*>(to)) = pack;
}

template <int N>
__device__ __forceinline__ void store(nothing*, const Pack<nothing, N>&) {}

// One after the other, from the first: a number of 16 bits waits for its neighbour where an instruction rounds two.
// Until then its fp32 bits are in the place of both.
//
// Otherwise the compiler would keep 16-bit numbers in a register each until all are stored, which are too many
// registers. The empty instruction wants two of them in one.
template <class T, int N>
__device__ __forceinline__ void put_at(Pack<T, N>& pack, int j, float x) {
#if ZF_ROUNDS_TWO
  if constexpr (sizeof(T) == 2 && N > 1) {
    float first = x;
    if (j % 2 == 1) {
      memcpy(&first, &pack.at[j - 1], sizeof first);
      const uint32_t both = round_two<T>(first, x);
      memcpy(&pack.at[j - 1], &both, sizeof both);
    } else {
      memcpy(&pack.at[j], &first, sizeof first);
    }
    return;
  }
#endif
  put(pack.at[j], x);
  if constexpr (sizeof(T) == 2 && N > 1) {
    if (j % 2 == 0) return;
    uint32_t pair;
    memcpy(&pair, &pack.at[j - 1], sizeof pair);
    asm("" : "+r"(pair));
    memcpy(&pack.at[j - 1], &pair, sizeof pair);
  }
}

constexpr size_t largest_of() { return 1; }

template <class... Sizes>
constexpr size_t largest_of(size_t size, Sizes... others) {
  return size > largest_of(others...) ? size : largest_of(others...);
}

// How many elements are a pack, if that of the largest type is 16 bytes.
template <class... Types>
constexpr int PACK_OF = int(16 / largest_of(sizeof(Types)...));

// How the elements [0, size) are walked over: in packs from `first` to `last`, the others one by one.
struct Span {
  int first, last, size;
};

// How many elements there are before the first pack; N if there is none.
template <int N, class T>
__device__ __forceinline__ int before_packs(const T* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  return address % sizeof(T) == 0 ? int((N - address / sizeof(T) % N) % N) : N;
}

// Packs must begin at the same element in all arrays.
template <int N, class T, class... Others>
__device__ __forceinline__ Span span_of(int64_t size, const T* pointer, const Others*... others) {
  const int all = int(size), first = before_packs<N>(pointer);
  const bool together = ((std::is_same_v<Others, nothing> || before_packs<N>(others) == first) && ...);
  if (!together || first >= N || first > all) return {all, all, all};
  return {first, first + (all - first) / N * N, all};
}

// What a thread is given at once: U packs of N elements, the first at i, the others `STEP` elements apart.
template <int PACK, int PACKS, int THREADS_TOGETHER>
struct Take {
  static constexpr int N = PACK, U = PACKS, STEP = PACK * THREADS_TOGETHER;
};

// `body(Take, i)` by thread `rank` of so many, until all elements have been taken. Who loads several packs
// before the first is used waits less for memory.
template <int N, int U = 1, int threads = THREADS, class Body>
__device__ __forceinline__ void sweep(Span span, int rank, const Body& body) {
  int i = span.first + N * rank;
  if constexpr (U > 1) {
#pragma unroll 1
    for (; i + (U - 1) * N * threads < span.last; i += U * N * threads) body(Take<N, U, threads>{}, i);
  }
#pragma unroll 1
  for (; i < span.last; i += N * threads) body(Take<N, 1, threads>{}, i);
  const int singles = span.first + span.size - span.last;
#pragma unroll 1
  for (int k = rank; k < singles; k += threads) {
    body(Take<1, 1, threads>{}, k < span.first ? k : span.last + (k - span.first));
  }
}

}  // namespace zf::cuda
