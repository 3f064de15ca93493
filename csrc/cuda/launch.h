// How kernels are started: by CUDA, or with ZF_EMULATE by emulate.h, which runs the same code on the CPU.
#pragma once

#include <stdexcept>
#include <string>

#include "../core/ops.h"

#if defined(ZF_EMULATE)
#include "emulate.h"
#else
#include <cuda_runtime.h>
#define ZF_SHARED(type, name) __shared__ type name
#endif

// Tests choose smaller ones, so that few elements make many threads and blocks.
#if !defined(ZF_THREADS)
#define ZF_THREADS 256
#define ZF_CHUNK 8192
#endif

namespace zf::cuda {

constexpr int THREADS = ZF_THREADS;  // of a block that walks over elements
constexpr int CHUNK = ZF_CHUNK;      // elements that such a block walks over
constexpr int ARGUMENT_BYTES = 4096;  // that a kernel can be given

inline __host__ __device__ int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t chunks_of(int64_t numel) { return (numel + CHUNK - 1) / CHUNK; }

// Blocks of threads. A kernel finds its place in blockIdx.
struct Grid {
  int64_t x, y, z;

  Grid(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};

// A call can be captured in a CUDA graph: nothing is copied, allocated or waited for.
template <class... Parameters, class... Arguments>
void launch(
    const char* name, void (*kernel)(Parameters...), Grid blocks, int threads, Stream stream,
    const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= ARGUMENT_BYTES, "more arguments than a kernel can be given");
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return;
#if defined(ZF_EMULATE)
  (void)stream;
  emulated::run(name, {unsigned(blocks.x), unsigned(blocks.y), unsigned(blocks.z)}, threads, [&] {
    kernel(arguments...);
  });
#else
  const dim3 grid(unsigned(blocks.x), unsigned(blocks.y), unsigned(blocks.z));
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("zero_full: kernel ") + name + ": " + cudaGetErrorString(error));
  }
#endif
}

}  // namespace zf::cuda
