// adam_step: see core/functions.h.
//
// The update itself is done in fp32, a block at a time; blocks of other types pass through the cache on their
// way in and out. One loop that does everything would need more registers than there are, and be slower.
#include "../core/adam.h"

#include "blocks.h"
#include "sums.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 16;

template <bool decoupled>
static void update(
    float* __restrict master, const float* __restrict grad, float* __restrict exp_avg, float* __restrict exp_avg_sq,
    const AdamNumbers& numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) adam<decoupled>(master[i], grad[i], exp_avg[i], exp_avg_sq[i], numbers);
}

template <class Copy>
static void follow(float* __restrict master, const Copy* __restrict copy, int64_t count) {
  for (int64_t i = 0; i < count; ++i) master[i] = unless_written(master[i], copy[i]);
}

void adam_step(const Slot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream) {
  const auto update_block = options.decoupled ? &update<true> : &update<false>;
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const Slot& slot = slots[s.part];
    const AdamNumbers numbers = adam_numbers(options, *slot.step);
    Block master(slot.master, types.master), grad(const_cast<void*>(slot.grad), types.grad);
    Block exp_avg(slot.exp_avg, types.moments), exp_avg_sq(slot.exp_avg_sq, types.moments);
    for_blocks(s.low, s.high, [&](int64_t at, int64_t size) {
      float* p = master.read(at, size);
      if (types.copy == Type::bf16) follow(p, static_cast<const bf16*>(slot.copy) + at, size);
      if (types.copy == Type::f16) follow(p, static_cast<const f16*>(slot.copy) + at, size);
      update_block(p, grad.read(at, size), exp_avg.read(at, size), exp_avg_sq.read(at, size), numbers, size);
      master.write_back(at, size);
      exp_avg.write_back(at, size);
      exp_avg_sq.write_back(at, size);
      if (slot.copy) write(slot.copy, types.copy, at, size, p);
    });
  });
}

}  // namespace zf::cpu::ZF_ISA
