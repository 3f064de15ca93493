// The GPU's operators, on the current stream. No CUDA header is needed: torch and the launchers have them all.
#define USE_CUDA  // declares the function that gives the current stream
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#undef USE_CUDA

#include <torch/csrc/stable/accelerator.h>

#include "core/ops.h"

namespace zf::cuda {
#include "core/functions.h"

struct Queue {
  static constexpr bool memory_is_here = false;

  explicit Queue(int device) : guard(device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  }
  operator Stream() const { return stream; }

  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
};
}  // namespace zf::cuda

#define ZF_SIDE cuda
#include "bind.h"

STABLE_TORCH_LIBRARY_IMPL(zero_full, CUDA, m) {
  using namespace zf::cuda;
  ZF_IMPLEMENTATIONS(m)
}
