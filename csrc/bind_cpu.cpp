// The CPU's operators, on torch's threads.
#include <cfenv>

#include "cpu/isa.h"

namespace zf::cpu {
struct Queue {
  static constexpr bool memory_is_here = true;

  explicit Queue(int) {}
  operator Stream() const { return nullptr; }
};
}  // namespace zf::cpu

#define ZF_SIDE cpu
#include "bind.h"

namespace zf::cpu {

// While it lives, its thread takes denormal numbers for 0 or not as its caller does: torch.set_flush_denormal tells
// one thread only, and results must not depend on how many there are.
class LikeItsCaller {
 public:
  explicit LikeItsCaller(const std::fenv_t& callers) {
    std::fegetenv(&own_);
    std::fesetenv(&callers);
  }
  ~LikeItsCaller() { std::fesetenv(&own_); }
  LikeItsCaller(const LikeItsCaller&) = delete;
  LikeItsCaller& operator=(const LikeItsCaller&) = delete;

 private:
  std::fenv_t own_;
};

void parallel_ranges(int64_t n, int64_t grain, RangeBody body, void* context) {
  const int64_t grains = (n + grain - 1) / grain;
  if (grains <= 1 || torch::stable::get_num_threads() == 1) {
    if (n > 0) body(context, 0, n);
    return;
  }
  std::fenv_t callers;
  std::fegetenv(&callers);
  torch::stable::parallel_for(0, grains, 1, [&](int64_t first, int64_t last) {
    const LikeItsCaller guard(callers);
    body(context, first * grain, last * grain < n ? last * grain : n);
  });
}

// For tests and the doctor: the instruction set in use, after asking for `wanted` unless that is 0.
static int64_t isa_op(int64_t wanted) {
  if (wanted != 0) {
    STD_TORCH_CHECK(
        use_isa(int(wanted)), "zero_full::cpu_isa: this machine has x86-64-v", best_isa(), " at most, not v", wanted);
  }
  return active_isa();
}

static void sum_and_divide_op(Tensors terms, Tensor out, double divisor) {
  const char* op = "sum_and_divide";
  STD_TORCH_CHECK(terms.size() >= 2, "zero_full::", op, ": there must be two terms at least");
  const Type type = type_of(terms[0], op, "terms"), type_of_sum = type_of(out, op, "out");
  check_memory(out, terms[0], op, "out");
  std::vector<void*> memory;
  for (const Tensor& term : terms) {
    check_memory(term, terms[0], op, "terms");
    STD_TORCH_CHECK(type_of(term, op, "terms") == type, "zero_full::", op, ": terms must all be of one type");
    STD_TORCH_CHECK(
        term.numel() == out.numel(), "zero_full::", op, ": a term has ", term.numel(), " elements, out ", out.numel());
    memory.push_back(term.data_ptr());
  }
  sum_and_divide({memory.data(), int64_t(memory.size()), type}, out.data_ptr(), type_of_sum, out.numel(), divisor);
}

static void nontemporal_copy_op(Tensor source, Tensor out) {
  const char* op = "nontemporal_copy";
  check_memory(source, out, op, "source");
  check_memory(out, source, op, "out");
  STD_TORCH_CHECK(
      source.scalar_type() == out.scalar_type(), "zero_full::", op, ": source and out must be of one type");
  STD_TORCH_CHECK(
      source.numel() == out.numel(), "zero_full::", op, ": source has ", source.numel(), " elements, out ",
      out.numel());
  nontemporal_copy(source.data_ptr(), out.data_ptr(), out.numel() * int64_t(out.element_size()));
}

}  // namespace zf::cpu

STABLE_TORCH_LIBRARY_IMPL(zero_full, CPU, m) {
  using namespace zf::cpu;
  ZF_IMPLEMENTATIONS(m)
  m.impl("sum_and_divide", TORCH_BOX(&sum_and_divide_op));
  m.impl("nontemporal_copy", TORCH_BOX(&nontemporal_copy_op));
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_full, m) { m.def("cpu_isa(int wanted) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(zero_full, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&zf::cpu::isa_op)); }
