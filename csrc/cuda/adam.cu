// adam_step: see core/functions.h.
#include "../core/adam.h"

#include "slots.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

using Kernel = void (*)(Slots, AdamOptions);

template <class Master, class Grad, class Moments, class Copy>
__global__ void __launch_bounds__(THREADS)
    adam_kernel(const __grid_constant__ Slots slots, const __grid_constant__ AdamOptions options) {
  const Chunk chunk = slots.chunk(blockIdx.x);
  const Slot& slot = slots.items[chunk.item];
  ZF_SHARED(AdamNumbers, shared_numbers);  // pow is slow: one thread does it for all
  if (threadIdx.x == 0) shared_numbers = adam_numbers(options, *slot.step);
  __syncthreads();
  const AdamNumbers numbers = shared_numbers;

  auto* master = static_cast<Master*>(slot.master) + chunk.low;
  auto* grad = static_cast<const Grad*>(slot.grad) + chunk.low;
  auto* exp_avg = static_cast<Moments*>(slot.exp_avg) + chunk.low;
  auto* exp_avg_sq = static_cast<Moments*>(slot.exp_avg_sq) + chunk.low;
  auto* copy = static_cast<Copy*>(slot.copy) + chunk.low;
  constexpr int PACK = PACK_OF<Master, Grad, Moments, Copy>;
  const Span span = span_of<PACK>(chunk.size, master, grad, exp_avg, exp_avg_sq, copy);
  sweep<PACK>(span, threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N;
    const auto old_ps = load<N>(master + i);
    const auto gs = load<N>(grad + i);
    const auto old_ms = load<N>(exp_avg + i);
    const auto old_vs = load<N>(exp_avg_sq + i);
    const auto old_copies = load<N>(static_cast<const Copy*>(copy) + i);
    Pack<Master, N> ps;
    Pack<Moments, N> ms, vs;
    Pack<Copy, N> copies;
    for (int j = 0; j < N; ++j) {
      float p = unless_written(to_f32(old_ps.at[j]), old_copies.at[j]);
      float m = to_f32(old_ms.at[j]), v = to_f32(old_vs.at[j]);
      if (options.decoupled) {
        adam<true>(p, to_f32(gs.at[j]), m, v, numbers);
      } else {
        adam<false>(p, to_f32(gs.at[j]), m, v, numbers);
      }
      put_at(ps, j, p);
      put_at(ms, j, m);
      put_at(vs, j, v);
      put_at(copies, j, p);
    }
    store(master + i, ps);
    store(exp_avg + i, ms);
    store(exp_avg_sq + i, vs);
    store(copy + i, copies);
  });
}

Kernel kernel_for(SlotTypes types) {
  return pick_types(types, [](auto master, auto grad, auto moments, auto copy) -> Kernel {
    return &adam_kernel<decltype(master), decltype(grad), decltype(moments), decltype(copy)>;
  });
}

}  // namespace

void adam_step(const Slot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream stream) {
  const Kernel kernel = kernel_for(types);
  for_slots(slots, count, [&](const Slots& batch) {
    launch("adam_step", kernel, batch.chunks(), THREADS, stream, batch, options);
  });
}

void adam_step_marking(const MarkedSlot*, int64_t, SlotTypes, const AdamOptions&, Stream) {
  throw std::runtime_error("zero_full: adam_step marks changed elements on the CPU only");
}

}  // namespace zf::cuda
