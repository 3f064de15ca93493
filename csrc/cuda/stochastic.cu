// adam_step_stochastic: see core/functions.h.
#include "../core/adam.h"
#include "../core/rounding.h"
#include "slots.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

using StochasticSlots = Batch<StochasticSlot>;
using StochasticKernel = void (*)(StochasticSlots, AdamOptions);

struct OfAll {
  AdamNumbers numbers;
  Chance chance;
};

template <class Grad, class Moments>
__global__ void __launch_bounds__(THREADS) stochastic_kernel(
    const __grid_constant__ StochasticSlots slots, const __grid_constant__ AdamOptions options) {
  const Chunk chunk = slots.chunk(blockIdx.x);
  const StochasticSlot& slot = slots.items[chunk.item];
  ZF_SHARED(OfAll, shared);
  if (threadIdx.x == 0) {
    const float step = *slot.step;
    shared = {adam_numbers(options, step), chance_of(slot.key, step)};
  }
  __syncthreads();
  const AdamNumbers numbers = shared.numbers;
  const Chance chance = shared.chance;

  auto* master = static_cast<bf16*>(slot.master) + chunk.low;
  auto* grad = static_cast<const Grad*>(slot.grad) + chunk.low;
  auto* exp_avg = static_cast<Moments*>(slot.exp_avg) + chunk.low;
  auto* exp_avg_sq = static_cast<Moments*>(slot.exp_avg_sq) + chunk.low;
  const uint64_t place = slot.place + uint64_t(chunk.low);
  constexpr int PACK = PACK_OF<bf16, Grad, Moments>;
  sweep<PACK>(span_of<PACK>(chunk.size, master, grad, exp_avg, exp_avg_sq), threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N;
    const auto old_ps = load<N>(master + i);
    const auto gs = load<N>(grad + i);
    const auto old_ms = load<N>(exp_avg + i);
    const auto old_vs = load<N>(exp_avg_sq + i);
    Pack<bf16, N> ps;
    Pack<Moments, N> ms, vs;
    for (int j = 0; j < N; ++j) {
      float p = to_f32(old_ps.at[j]), m = to_f32(old_ms.at[j]), v = to_f32(old_vs.at[j]);
      if (options.decoupled) {
        adam<true>(p, to_f32(gs.at[j]), m, v, numbers);
      } else {
        adam<false>(p, to_f32(gs.at[j]), m, v, numbers);
      }
      const uint64_t here = place + uint64_t(i + j);
      const uint32_t drawn = draw(chance, uint32_t(here), uint32_t(here >> 32));
      if constexpr (sizeof(Moments) == 2) {
        m = rounded_by(m, drawn >> 16);
        v = rounded_by(v, draw_again(chance, drawn));
      }
      put_at(ps, j, rounded_by(p, drawn));  // exactly: that is a bf16 number already
      put_at(ms, j, m);
      put_at(vs, j, v);
    }
    store(master + i, ps);
    store(exp_avg + i, ms);
    store(exp_avg_sq + i, vs);
  });
}

template <class Grad>
StochasticKernel stochastic_kernel_for(Type moments) {
  return moments == Type::bf16 ? &stochastic_kernel<Grad, bf16> : &stochastic_kernel<Grad, float>;
}

}  // namespace

void adam_step_stochastic(
    const StochasticSlot* slots, int64_t count, SlotTypes types, const AdamOptions& options, Stream stream) {
  const StochasticKernel kernel = types.grad == Type::bf16  ? stochastic_kernel_for<bf16>(types.moments)
                                  : types.grad == Type::f16 ? stochastic_kernel_for<f16>(types.moments)
                                                            : stochastic_kernel_for<float>(types.moments);
  for_batches<StochasticSlot>(slots, count, [](const StochasticSlot& slot) { return slot; }, [&](const auto& batch) {
    launch("adam_step_stochastic", kernel, batch.chunks(), THREADS, stream, batch, options);
  });
}

}  // namespace zf::cuda
