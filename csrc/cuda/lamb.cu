// lamb_norms and lamb_step: see core/functions.h. Each chunk leaves its two sums in the workspace; then one block
// for each slot adds up those of its chunks.
#include "../core/lamb.h"

#include "reduce.h"
#include "slots.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

struct Sums {
  double weights, changes;  // of the squares of masters and updates
};

// First half --------------------------------------------------------------------------------------

using NormsKernel = void (*)(Slots, LambNumbers, Sums*);

template <class Master, class Grad, class Moments>
__global__ void __launch_bounds__(THREADS)
    norms_kernel(const __grid_constant__ Slots slots, const __grid_constant__ LambNumbers numbers, Sums* partial) {
  const Chunk chunk = slots.chunk(blockIdx.x);
  const Slot& slot = slots.items[chunk.item];
  auto* master = static_cast<const Master*>(slot.master) + chunk.low;
  auto* grad = static_cast<const Grad*>(slot.grad) + chunk.low;
  auto* exp_avg = static_cast<Moments*>(slot.exp_avg) + chunk.low;
  auto* exp_avg_sq = static_cast<Moments*>(slot.exp_avg_sq) + chunk.low;
  constexpr int PACK = PACK_OF<Master, Grad, Moments>;
  Sums sums{0, 0};
  sweep<PACK>(span_of<PACK>(chunk.size, master, grad, exp_avg, exp_avg_sq), threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N;
    const auto ps = load<N>(master + i);
    const auto gs = load<N>(grad + i);
    const auto old_ms = load<N>(exp_avg + i);
    const auto old_vs = load<N>(exp_avg_sq + i);
    Pack<Moments, N> ms, vs;
    float weights[N], changes[N];
    for (int j = 0; j < N; ++j) {
      float m = to_f32(old_ms.at[j]), v = to_f32(old_vs.at[j]);
      lamb_moments(to_f32(gs.at[j]), m, v, numbers);
      put_at(ms, j, m);
      put_at(vs, j, v);
    }
    for (int j = 0; j < N; ++j) {
      weights[j] = to_f32(ps.at[j]);
      changes[j] = lamb_update(weights[j], to_f32(ms.at[j]), to_f32(vs.at[j]), numbers);
    }
    store(exp_avg + i, ms);
    store(exp_avg_sq + i, vs);
    sums.weights += sum_of_squares(weights);
    sums.changes += sum_of_squares(changes);
  });
  sums.weights = block_sum(sums.weights);
  sums.changes = block_sum(sums.changes);
  if (threadIdx.x == 0) partial[slots.first_chunk + blockIdx.x] = sums;
}

__global__ void __launch_bounds__(THREADS)
    combine_kernel(const __grid_constant__ Batch<Size> slots, const Sums* partial, Sums* norms) {
  const int item = blockIdx.x;
  Sums sums{0, 0};
#pragma unroll 4
  for (int i = slots.start(item) + threadIdx.x; i < slots.ends[item]; i += THREADS) {
    const Sums more = partial[slots.first_chunk + i];
    sums.weights += more.weights;
    sums.changes += more.changes;
  }
  sums.weights = block_sum(sums.weights);
  sums.changes = block_sum(sums.changes);
  if (threadIdx.x == 0) norms[slots.first_item + item] = sums;
}

// Second half -------------------------------------------------------------------------------------

using StepKernel = void (*)(Slots, LambOptions, const double*);

template <class Master, class Moments, class Copy>
__global__ void __launch_bounds__(THREADS) step_kernel(
    const __grid_constant__ Slots slots, const __grid_constant__ LambOptions options, const double* norms) {
  const Chunk chunk = slots.chunk(blockIdx.x);
  const Slot& slot = slots.items[chunk.item];
  ZF_SHARED(float, shared_size);  // pow is slow: one thread does it for all
  if (threadIdx.x == 0) {
    shared_size = lamb_step_size(options, *slot.step, norms + 2 * (slots.first_item + chunk.item));
  }
  __syncthreads();
  const float size = shared_size;
  const LambNumbers numbers = lamb_numbers(options);

  auto* master = static_cast<Master*>(slot.master) + chunk.low;
  auto* exp_avg = static_cast<const Moments*>(slot.exp_avg) + chunk.low;
  auto* exp_avg_sq = static_cast<const Moments*>(slot.exp_avg_sq) + chunk.low;
  auto* copy = static_cast<Copy*>(slot.copy) + chunk.low;
  constexpr int PACK = PACK_OF<Master, Moments, Copy>;
  sweep<PACK>(span_of<PACK>(chunk.size, master, exp_avg, exp_avg_sq, copy), threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N;
    const auto old_ps = load<N>(master + i);
    const auto ms = load<N>(exp_avg + i);
    const auto vs = load<N>(exp_avg_sq + i);
    Pack<Master, N> ps;
    Pack<Copy, N> copies;
    for (int j = 0; j < N; ++j) {
      const float p = to_f32(old_ps.at[j]);
      put_at(ps, j, p - size * lamb_update(p, to_f32(ms.at[j]), to_f32(vs.at[j]), numbers));
    }
    for (int j = 0; j < N; ++j) put_at(copies, j, to_f32(ps.at[j]));
    store(master + i, ps);
    store(copy + i, copies);
  });
}

}  // namespace

void lamb_norms(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, double* norms,
    double* workspace, Stream stream) {
  const NormsKernel kernel = pick_types(types, [](auto master, auto grad, auto moments, auto) -> NormsKernel {
    return &norms_kernel<decltype(master), decltype(grad), decltype(moments)>;
  });
  Sums* partial = reinterpret_cast<Sums*>(workspace);
  for_slots(slots, count, [&](const Slots& batch) {
    launch("lamb_norms", kernel, batch.chunks(), THREADS, stream, batch, lamb_numbers(options), partial);
  });
  for_sizes(slots, count, [&](const Batch<Size>& batch) {
    launch(
        "lamb_norms' sums", combine_kernel, batch.count, THREADS, stream, batch,
        static_cast<const Sums*>(partial), reinterpret_cast<Sums*>(norms));
  });
}

void lamb_step(
    const Slot* slots, int64_t count, SlotTypes types, const LambOptions& options, const double* norms,
    Stream stream) {
  const StepKernel kernel = pick_types(types, [](auto master, auto, auto moments, auto copy) -> StepKernel {
    return &step_kernel<decltype(master), decltype(moments), decltype(copy)>;
  });
  for_slots(slots, count, [&](const Slots& batch) {
    launch("lamb_step", kernel, batch.chunks(), THREADS, stream, batch, options, norms);
  });
}

int64_t lamb_workspace(const Slot* slots, int64_t count) { return 2 * chunks_of_all(slots, count); }

}  // namespace zf::cuda
