// lamb_norms and lamb_step: see core/functions.h.
#include "../core/lamb.h"

#include "blocks.h"
#include "sums.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 14;

// First half --------------------------------------------------------------------------------------

static void update_moments(
    const float* __restrict grad, float* __restrict exp_avg, float* __restrict exp_avg_sq, const LambNumbers& numbers,
    int64_t count) {
  for (int64_t i = 0; i < count; ++i) lamb_moments(grad[i], exp_avg[i], exp_avg_sq[i], numbers);
}

// Sums of squares of masters and of their updates.
struct Squares {
  double weights[LANES] = {}, changes[LANES] = {};

  void add(const float* master, const float* exp_avg, const float* exp_avg_sq, const LambNumbers& numbers, int64_t n) {
    auto one = [&](int64_t i, int lane) __attribute__((always_inline)) {
      const double weight = master[i], change = lamb_update(master[i], exp_avg[i], exp_avg_sq[i], numbers);
      weights[lane] += weight * weight;
      changes[lane] += change * change;
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
      for (int lane = 0; lane < LANES; ++lane) one(i + lane, lane);
    }
    for (int lane = 0; i + lane < n; ++lane) one(i + lane, lane);
  }
};

int64_t lamb_workspace(const Slot* slots, int64_t count) { return 2 * places(slots, count, GRAIN); }

void lamb_norms(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, double* norms,
    double* workspace, Stream) {
  const LambNumbers numbers = lamb_numbers(options);
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const Slot& slot = slots[s.part];
    Block master(slot.master, types.master), grad(const_cast<void*>(slot.grad), types.grad);
    Block exp_avg(slot.exp_avg, types.moments), exp_avg_sq(slot.exp_avg_sq, types.moments);
    Squares squares;
    for_blocks(s.low, s.high, [&](int64_t at, int64_t size) {
      update_moments(grad.read(at, size), exp_avg.read(at, size), exp_avg_sq.read(at, size), numbers, size);
      exp_avg.write_back(at, size);
      exp_avg_sq.write_back(at, size);
      // Read again, as the second half will: rounded to their type.
      squares.add(master.read(at, size), exp_avg.read(at, size), exp_avg_sq.read(at, size), numbers, size);
    });
    workspace[2 * s.place] = in_total(squares.weights);
    workspace[2 * s.place + 1] = in_total(squares.changes);
  });
  for (int64_t i = 0; i < 2 * count; ++i) norms[i] = 0;
  each_stretch(slots, GRAIN, 0, all_elements(slots, count), [=](const Stretch& s) {
    for (int k = 0; k < 2; ++k) norms[2 * s.part + k] += workspace[2 * s.place + k];
  });
}

// Second half -------------------------------------------------------------------------------------

static void move(
    float* __restrict master, const float* __restrict exp_avg, const float* __restrict exp_avg_sq,
    const LambNumbers& numbers, float size, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    master[i] = master[i] - size * lamb_update(master[i], exp_avg[i], exp_avg_sq[i], numbers);
  }
}

void lamb_step(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, const double* norms, Stream) {
  const LambNumbers numbers = lamb_numbers(options);
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const Slot& slot = slots[s.part];
    const float step_size = lamb_step_size(options, *slot.step, norms + 2 * s.part);
    Block master(slot.master, types.master);
    Block exp_avg(slot.exp_avg, types.moments), exp_avg_sq(slot.exp_avg_sq, types.moments);
    for_blocks(s.low, s.high, [&](int64_t at, int64_t size) {
      move(
          master.read(at, size), exp_avg.read(at, size), exp_avg_sq.read(at, size), numbers, step_size, size);
      master.write_back(at, size);
      if (slot.copy) write(slot.copy, types.copy, at, size, master.read(at, size));
    });
  });
}

}  // namespace zf::cpu::ZF_ISA
