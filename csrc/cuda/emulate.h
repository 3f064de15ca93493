// What the kernels use of CUDA, on the CPU: a test tool, so that a machine without a GPU executes their code.
//
// The threads of a block are fibers. One runs at a time, until it waits for others or ends; the order in which
// they get their turns, and that of the blocks, is chosen by the test: a result that depends on it is a race.
// When nobody can go on, everybody must be waiting for something that can happen. If not, the launch fails and
// says who waits where. Shared memory is filled with NaN for each block, and watched at its edges.
//
// It does not show: speed, how memory accesses of running warps are ordered, and arithmetic that differs between
// the processors (pow).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define ZF_SHARED(type, name) \
  static char name##_key;     \
  type& name = *static_cast<type*>(zf::emulated::shared(&name##_key, sizeof(type)))

namespace zf::emulated {

struct Index {
  unsigned x, y, z;
};

// Where in the source somebody waits.
struct Place {
  const char* file;
  int line;
};

enum class Order : int { forward, reverse, shuffled };
void choose_order(Order, uint64_t seed);

void run(const char* kernel, Index blocks, int threads, const std::function<void()>& thread);
[[noreturn]] void fail(const std::string& what);  // from within a thread
void* shared(const void* key, size_t bytes);
void barrier(Place);
const uint64_t* exchange(uint32_t mask, uint64_t value, Place);  // what each lane of this warp has given

template <class T>
T from_lane(uint32_t mask, T value, unsigned lane, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane gives up to eight bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, place)[lane];
  if (!(mask >> lane & 1)) fail("a shuffle reads from lane " + std::to_string(lane) + ", not in the mask");
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace zf::emulated

extern zf::emulated::Index threadIdx, blockIdx, blockDim;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  zf::emulated::barrier({file, line});
}

template <class T>
T __shfl_xor_sync(
    uint32_t mask, T value, int other, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return zf::emulated::from_lane(mask, value, (threadIdx.x % 32) ^ unsigned(other), {file, line});
}
