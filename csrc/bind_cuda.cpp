// The GPU's operators, on the current stream. No CUDA header is needed: torch and the launchers have them all.
#define USE_CUDA  // declares the function that gives the current stream
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#undef USE_CUDA

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#include <exception>
#include <string>

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

namespace {

// What STABLE_TORCH_LIBRARY_IMPL makes as soon as a library is opened is here made when the loader asks for it.
struct Registration {
  TorchLibraryHandle library = nullptr;

  Registration() {
    TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_impl("zero_full", "CUDA", __FILE__, __LINE__, &library));
    using namespace zf::cuda;
    ZF_IMPLEMENTATIONS((*this))
  }

  void impl(const char* name, void (*function)(StableIValue*, uint64_t, uint64_t)) {
    TORCH_ERROR_CODE_CHECK(torch_library_impl(library, name, function, TORCH_ABI_VERSION));
  }
};

}  // namespace

// Called after `zf_cuda_check` (cuda/check.cu), as often as one likes. Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* zf_cuda_register() {
  try {
    static const Registration registration;  // for as long as the process lives
    return nullptr;
  } catch (const std::exception& error) {
    static const std::string reason = error.what();
    return reason.c_str();
  }
}
