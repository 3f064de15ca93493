// Whether the kernels of this library run here: for the loader, which asks before torch hears of the operators.
#include <cuda_runtime.h>

#define ZF_FOR_THE_LOADER extern "C" __attribute__((visibility("default")))

namespace {

constexpr int ANSWER = 42;

__global__ void answer_kernel(int* at) { *at = ANSWER; }

}  // namespace

// Of the CUDA runtime that nvcc has put into this library, and the newest that the driver serves: 12040 is 12.4,
// 0 is no driver.
ZF_FOR_THE_LOADER int zf_cuda_runtime() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

ZF_FOR_THE_LOADER int zf_cuda_driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

// Null if a kernel runs on the current device, else why not. Waits for the device.
ZF_FOR_THE_LOADER const char* zf_cuda_check() {
  int *at = nullptr, answer = 0;
  cudaError_t error = cudaMalloc(&at, sizeof answer);
  if (error == cudaSuccess) {
    answer_kernel<<<1, 1>>>(at);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaMemcpy(&answer, at, sizeof answer, cudaMemcpyDeviceToHost);
    cudaFree(at);
  }
  if (error == cudaSuccess) return answer == ANSWER ? nullptr : "a kernel did not write what it should";
  cudaGetLastError();  // so that nobody else meets this error
  return cudaGetErrorString(error);
}
