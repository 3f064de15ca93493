// adam_step, adam_step_marking and adam_step_stochastic: see core/functions.h.
//
// The update itself is done in fp32, a block at a time; blocks of other types pass through the cache on their
// way in and out. One loop that does everything would need more registers than there are, and be slower.
#include "../core/adam.h"
#include "../core/rounding.h"

#include "bits.h"
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

// Steps the elements [low, high) of a slot, block by block. `begin(p, at, size)` lets masters follow what somebody has
// written to their copy, before their step, and `end(p, at, size)` writes the copy.
template <class Begin, class End>
static void step_slot(
    const Slot& slot, SlotTypes types, const AdamOptions& options, int64_t low, int64_t high, const Begin& begin,
    const End& end) {
  const auto update_block = options.decoupled ? &update<true> : &update<false>;
  const AdamNumbers numbers = adam_numbers(options, *slot.step);
  Block master(slot.master, types.master), grad(const_cast<void*>(slot.grad), types.grad);
  Block exp_avg(slot.exp_avg, types.moments), exp_avg_sq(slot.exp_avg_sq, types.moments);
  for_blocks(low, high, [&](int64_t at, int64_t size) {
    float* p = master.read(at, size);
    begin(p, at, size);
    update_block(p, grad.read(at, size), exp_avg.read(at, size), exp_avg_sq.read(at, size), numbers, size);
    master.write_back(at, size);
    exp_avg.write_back(at, size);
    exp_avg_sq.write_back(at, size);
    end(p, at, size);
  });
}

void adam_step(const Slot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream) {
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const Slot& slot = slots[s.part];
    const auto begin = [&](float* p, int64_t at, int64_t size) {
      if (types.copy == Type::bf16) follow(p, static_cast<const bf16*>(slot.copy) + at, size);
      if (types.copy == Type::f16) follow(p, static_cast<const f16*>(slot.copy) + at, size);
    };
    const auto end = [&](const float* p, int64_t at, int64_t size) {
      if (slot.copy) write(slot.copy, types.copy, at, size, p);
    };
    step_slot(slot, types, options, s.low, s.high, begin, end);
  });
}

// Marking what changes ----------------------------------------------------------------------------

// `written`: flags of the elements of a copy that are not their rounded master.
template <class Copy>
static void follow(
    float* __restrict master, const Copy* __restrict copy, uint8_t* __restrict written, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Copy rounded;
    put(rounded, master[i]);
    const bool differs = rounded.bits != copy[i].bits;
    written[i] = differs;
    master[i] = differs ? to_f32(copy[i]) : master[i];
  }
}

template <class Copy>
static void narrow_and_mark(
    const float* __restrict from, Copy* __restrict copy, uint8_t* __restrict flags, uint8_t* __restrict changed,
    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Copy rounded;
    put(rounded, from[i]);
    flags[i] |= rounded.bits != copy[i].bits;
    copy[i] = rounded;
  }
  for (int64_t i = count; i % 8 != 0; ++i) flags[i] = 0;
  for (int64_t i = 0; i < count; i += 8) changed[i / 8] |= gather_bits(flags + i);
}

void adam_step_marking(const MarkedSlot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream) {
  // The slots' sizes are whole bytes of bits, so that no two threads write to one byte.
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const Slot& slot = slots[s.part].slot;
    uint8_t* changed = slots[s.part].changed;
    auto* as_bf16 = static_cast<bf16*>(slot.copy);
    auto* as_f16 = static_cast<f16*>(slot.copy);
    alignas(64) uint8_t flags[BLOCK];
    const auto begin = [&](float* p, int64_t at, int64_t size) {
      if (types.copy == Type::bf16) follow(p, as_bf16 + at, flags, size);
      if (types.copy == Type::f16) follow(p, as_f16 + at, flags, size);
    };
    const auto end = [&](const float* p, int64_t at, int64_t size) {
      if (types.copy == Type::bf16) narrow_and_mark(p, as_bf16 + at, flags, changed + at / 8, size);
      if (types.copy == Type::f16) narrow_and_mark(p, as_f16 + at, flags, changed + at / 8, size);
    };
    step_slot(slot, types, options, s.low, s.high < slot.numel ? s.high : slot.numel, begin, end);
  });
}

// Stochastic rounding -----------------------------------------------------------------------------

static void draw_for(uint32_t* __restrict drawn, const Chance& chance, uint64_t place, int64_t count) {
  const uint32_t first = uint32_t(place), above = uint32_t(place >> 32);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t low = first + uint32_t(i);
    drawn[i] = draw(chance, low, above + (low < first));
  }
}

template <int SHIFT>
static void round_by(float* __restrict numbers, const uint32_t* __restrict drawn, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = rounded_by(numbers[i], drawn[i] >> SHIFT);
}

// Numbers in bf16 are in the blocks' own room, in fp32, until they are written back: rounded by then, exactly.
void adam_step_stochastic(
    const StochasticSlot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream) {
  const auto update_block = options.decoupled ? &update<true> : &update<false>;
  for_stretches(slots, count, GRAIN, [&](const Stretch& s) {
    const StochasticSlot& slot = slots[s.part];
    const AdamNumbers numbers = adam_numbers(options, *slot.step);
    const Chance chance = chance_of(slot.key, *slot.step);
    Block master(slot.master, types.master), grad(const_cast<void*>(slot.grad), types.grad);
    Block exp_avg(slot.exp_avg, types.moments), exp_avg_sq(slot.exp_avg_sq, types.moments);
    uint32_t drawn[BLOCK];
    for_blocks(s.low, s.high, [&](int64_t at, int64_t size) {
      float *p = master.read(at, size), *m = exp_avg.read(at, size), *v = exp_avg_sq.read(at, size);
      update_block(p, grad.read(at, size), m, v, numbers, size);
      draw_for(drawn, chance, slot.place + uint64_t(at), size);
      round_by<0>(p, drawn, size);
      if (types.moments == Type::bf16) {
        round_by<16>(m, drawn, size);
        for (int64_t i = 0; i < size; ++i) drawn[i] = draw_again(chance, drawn[i]);
        round_by<0>(v, drawn, size);
      }
      master.write_back(at, size);
      exp_avg.write_back(at, size);
      exp_avg_sq.write_back(at, size);
    });
  });
}

}  // namespace zf::cpu::ZF_ISA
