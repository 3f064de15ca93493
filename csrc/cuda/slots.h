// Choosing an optimizer's kernel for the types of its slots.
#pragma once

#include "batch.h"

namespace zf::cuda {

using Slots = Batch<Slot>;

template <class Body>
void for_slots(const Slot* slots, int64_t count, const Body& body) {
  for_batches<Slot>(slots, count, [](const Slot& slot) { return slot; }, body);
}

// `make(master, grad, moments, copy)` with a value of each type. Masters are fp32 or bf16, moments, too.
template <class Make>
auto pick_types(SlotTypes types, const Make& make) {
  auto with_copy = [&](auto master, auto grad, auto moments) {
    if (types.copy == Type::bf16) return make(master, grad, moments, bf16{});
    if (types.copy == Type::f16) return make(master, grad, moments, f16{});
    return make(master, grad, moments, nothing{});
  };
  auto with_moments = [&](auto master, auto grad) {
    return types.moments == Type::bf16 ? with_copy(master, grad, bf16{}) : with_copy(master, grad, float{});
  };
  auto with_grad = [&](auto master) {
    if (types.grad == Type::bf16) return with_moments(master, bf16{});
    if (types.grad == Type::f16) return with_moments(master, f16{});
    return with_moments(master, float{});
  };
  return types.master == Type::bf16 ? with_grad(bf16{}) : with_grad(float{});
}

}  // namespace zf::cuda
