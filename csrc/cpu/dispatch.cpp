// Which instruction set is used, and the operators themselves: they pass the call on to it.
#include "isa.h"

namespace zf::cpu {

int best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return V4;
  if (__builtin_cpu_supports("x86-64-v3")) return V3;
#endif
  return V2;
}

static int wanted_isa = best_isa();

int active_isa() { return wanted_isa; }

bool use_isa(int wanted) {
  const bool here = wanted >= V2 && wanted <= best_isa();
  if (here) wanted_isa = wanted;
  return here;
}

#if defined(__x86_64__)
#define PASS_ON(name, ...)               \
  if (wanted_isa == V4) {                \
    v4::name(__VA_ARGS__);               \
  } else if (wanted_isa == V3) {         \
    v3::name(__VA_ARGS__);               \
  } else {                               \
    v2::name(__VA_ARGS__);               \
  }
#else
#define PASS_ON(name, ...) v2::name(__VA_ARGS__);
#endif

void adam_step(const Slot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream s) {
  PASS_ON(adam_step, slots, count, types, options, s)
}

void adam_step_marking(const MarkedSlot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream s) {
  PASS_ON(adam_step_marking, slots, count, types, options, s)
}

void adam_step_stochastic(
    const StochasticSlot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream s) {
  PASS_ON(adam_step_stochastic, slots, count, types, options, s)
}

void unscale_norm_check(
    const Piece* pieces, int64_t count, Type type, double factor, double* sum, int64_t* first, double* work, Stream s) {
  PASS_ON(unscale_norm_check, pieces, count, type, factor, sum, first, work, s)
}

void lamb_norms(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, double* norms, double* work,
    Stream s) {
  PASS_ON(lamb_norms, slots, count, types, options, norms, work, s)
}

void lamb_step(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, const double* norms, Stream s) {
  PASS_ON(lamb_step, slots, count, types, options, norms, s)
}

void sign_pack(
    const void* values, Type type, float* error, int64_t numel, Cuts cuts, bool l1, uint8_t* packed, float* scales,
    double* work, Stream s) {
  PASS_ON(sign_pack, values, type, error, numel, cuts, l1, packed, scales, work, s)
}

void sign_unpack_mean(
    const uint8_t* packed, const float* scales, int64_t chunks, Cuts cuts, void* out, Type type, int64_t numel,
    bool add, Stream s) {
  PASS_ON(sign_unpack_mean, packed, scales, chunks, cuts, out, type, numel, add, s)
}

void quantize_blocks(
    const void* numbers, Type type, const BlockRows& rows, uint8_t* payloads, int bits, int64_t block, Stream s) {
  PASS_ON(quantize_blocks, numbers, type, rows, payloads, bits, block, s)
}

void dequantize_blocks(
    const uint8_t* payloads, void* out, Type type, const BlockRows& rows, int bits, int64_t block, bool add,
    Stream s) {
  PASS_ON(dequantize_blocks, payloads, out, type, rows, bits, block, add, s)
}

void sum_and_divide(const Terms& terms, void* out, Type type, int64_t numel, double divisor) {
  PASS_ON(sum_and_divide, terms, out, type, numel, divisor)
}

void nontemporal_copy(const void* source, void* out, int64_t bytes) {
  PASS_ON(nontemporal_copy, source, out, bytes)
}

int64_t unscale_workspace(const Piece* pieces, int64_t count) { return v2::unscale_workspace(pieces, count); }
int64_t lamb_workspace(const Slot* slots, int64_t count) { return v2::lamb_workspace(slots, count); }
int64_t sign_workspace(int64_t numel, int64_t pieces) { return v2::sign_workspace(numel, pieces); }

}  // namespace zf::cpu
