// unscale_norm_check: see core/functions.h. Each chunk leaves its sum and the place of its first element that is
// not finite in the workspace; one more block combines them.
#include "batch.h"
#include "reduce.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

constexpr int64_t NOWHERE = INT64_MAX;

struct PlacedPiece {
  void* data;
  int64_t numel, before;  // how many elements the pieces before have
};

using Pieces = Batch<PlacedPiece>;
using Kernel = void (*)(Pieces, float, double*, int64_t*);

template <class T, bool scale>
__global__ void __launch_bounds__(THREADS)
    unscale_kernel(const __grid_constant__ Pieces pieces, float factor, double* sums, int64_t* firsts) {
  const Chunk chunk = pieces.chunk(blockIdx.x);
  const PlacedPiece& piece = pieces.items[chunk.item];
  T* data = static_cast<T*>(piece.data) + chunk.low;
  double sum = 0;
  int first = CHUNK;
  constexpr int PACK = PACK_OF<T>, AT_ONCE = scale ? 2 : 4;
  sweep<PACK, AT_ONCE>(span_of<PACK>(chunk.size, data), threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N, U = decltype(take)::U, STEP = decltype(take)::STEP;
    Pack<T, N> packs[U];
#pragma unroll
    for (int u = 0; u < U; ++u) packs[u] = load<N>(data + i + u * STEP);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float x[N];
      if (scale) {
        const Pack<T, N> old = packs[u];
        for (int j = 0; j < N; ++j) put_at(packs[u], j, to_f32(old.at[j]) * factor);
        store(data + i + u * STEP, packs[u]);
      }
      for (int j = 0; j < N; ++j) x[j] = to_f32(packs[u].at[j]);
      const double squares = sum_of_squares(x);
      sum += squares;
      if (squares < double(INFINITY)) continue;
      for (int j = 0; j < N; ++j) {
        if (!is_finite(x[j])) first = Least{}(first, i + u * STEP + j);
      }
    }
  });
  sum = block_sum(sum);
  first = block_reduce<THREADS>(first, CHUNK, Least{});
  if (threadIdx.x == 0) {
    sums[pieces.first_chunk + blockIdx.x] = sum;
    firsts[pieces.first_chunk + blockIdx.x] = first == CHUNK ? NOWHERE : piece.before + chunk.low + first;
  }
}

__global__ void __launch_bounds__(MANY_THREADS)
    combine_kernel(const double* sums, const int64_t* firsts, int64_t chunks, double* sum, int64_t* first) {
  double total = 0;
  int64_t least = NOWHERE;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < chunks; i += MANY_THREADS) {
    total += sums[i];
    least = Least{}(least, firsts[i]);
  }
  total = block_sum<MANY_THREADS>(total);
  least = block_reduce<MANY_THREADS>(least, NOWHERE, Least{});
  if (threadIdx.x == 0) {
    *sum = total;
    *first = least == NOWHERE ? -1 : least;
  }
}

template <class T>
Kernel kernel_for(bool scale) {
  return scale ? unscale_kernel<T, true> : unscale_kernel<T, false>;
}

Kernel kernel_for(Type type, bool scale) {
  if (type == Type::bf16) return kernel_for<bf16>(scale);
  return type == Type::f16 ? kernel_for<f16>(scale) : kernel_for<float>(scale);
}

}  // namespace

void unscale_norm_check(
    const Piece* pieces, int64_t count, Type type, double factor, double* sum, int64_t* first, double* workspace,
    Stream stream) {
  const Kernel kernel = kernel_for(type, factor != 1);
  const int64_t chunks = chunks_of_all(pieces, count);
  double* sums = workspace;
  int64_t* firsts = reinterpret_cast<int64_t*>(workspace + chunks);
  int64_t before = 0;
  const auto place = [&](const Piece& piece) {
    before += piece.numel;
    return PlacedPiece{piece.data, piece.numel, before - piece.numel};
  };
  for_batches<PlacedPiece>(pieces, count, place, [&](const Pieces& batch) {
    launch("unscale_norm_check", kernel, batch.chunks(), THREADS, stream, batch, float(factor), sums, firsts);
  });
  launch(
      "unscale_norm_check's sum", combine_kernel, 1, MANY_THREADS, stream, static_cast<const double*>(sums),
      static_cast<const int64_t*>(firsts), chunks, sum, first);
}

int64_t unscale_workspace(const Piece* pieces, int64_t count) { return 2 * chunks_of_all(pieces, count); }

}  // namespace zf::cuda
