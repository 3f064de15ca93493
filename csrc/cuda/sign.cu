// sign_pack and sign_unpack_mean: see core/functions.h.
//
// A chunk may have parts of several pieces. What piece p has in chunk c leaves its sum at place c + p of the
// workspace: with each part one of the two grows, or both. Then one block for each piece adds up its sums.
#include "../core/sign.h"

#include "reduce.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

// What is wanted. `Value` is `nothing` if all of it is in the error.
template <class Value>
struct Wanted {
  const Value* values;
  const float* error;

  template <int N>
  __device__ __forceinline__ Pack<float, N> get(int64_t i) const {
    auto wanted = load<N>(error + i);
    if constexpr (!std::is_same_v<Value, nothing>) {
      const auto pack = load<N>(values + i);
      for (int j = 0; j < N; ++j) wanted.at[j] = to_f32(pack.at[j]) + wanted.at[j];
    }
    return wanted;
  }
};

// The first piece that ends behind i; cuts.count in the padding.
__device__ __forceinline__ int64_t piece_at(Cuts cuts, int64_t i) {
  int64_t low = 0, high = cuts.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cuts.ends[middle] > i) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The piece of an element, for one thread that looks at them in order.
struct Place {
  Cuts cuts;
  int64_t piece, end;

  __device__ __forceinline__ Place(Cuts cuts, int64_t i) : cuts(cuts), piece(piece_at(cuts, i)), end(end_of()) {}

  __device__ __forceinline__ bool padding() const { return piece == cuts.count; }

  // Did the piece change?
  __device__ __forceinline__ bool go_to(int64_t i) {
    if (i < end) return false;
    while (i >= end) {
      ++piece;
      end = end_of();
    }
    return true;
  }

 private:
  __device__ __forceinline__ int64_t end_of() const { return padding() ? INT64_MAX : cuts.ends[piece]; }
};

// Scales ------------------------------------------------------------------------------------------

// Of one thread's part of [a, b).
template <class Value>
__device__ __forceinline__ double weigh(Wanted<Value> wanted, int64_t a, int64_t b, bool l1) {
  constexpr int PACK = PACK_OF<float, Value>, AT_ONCE = 2;
  const Wanted<Value> from_a{wanted.values + a, wanted.error + a};
  double sum = 0;
  sweep<PACK, AT_ONCE>(span_of<PACK>(b - a, from_a.error, from_a.values), threadIdx.x, [&](auto take, int i) {
    constexpr int N = decltype(take)::N, U = decltype(take)::U, STEP = decltype(take)::STEP;
    Pack<float, N> packs[U];
#pragma unroll
    for (int u = 0; u < U; ++u) packs[u] = from_a.template get<N>(i + u * STEP);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      for (int j = 0; j < N; ++j) sum += sign_weight(packs[u].at[j], l1);
    }
  });
  return sum;
}

template <class Value>
__global__ void __launch_bounds__(THREADS)
    sums_kernel(Wanted<Value> wanted, int64_t numel, Cuts cuts, bool l1, double* sums) {
  const int64_t low = int64_t(blockIdx.x) * CHUNK, high = lesser(low + CHUNK, numel);
  Place place(cuts, low);
  for (int64_t a = low; a < high && !place.padding();) {
    const int64_t b = lesser(place.end, high);
    const double sum = block_sum(weigh(wanted, a, b, l1));
    if (threadIdx.x == 0) sums[blockIdx.x + place.piece] = sum;
    place.go_to(b);
    a = b;
  }
}

__global__ void __launch_bounds__(THREADS) scales_kernel(const double* sums, Cuts cuts, bool l1, float* scales) {
  const int64_t piece = blockIdx.x, start = piece == 0 ? 0 : cuts.ends[piece - 1], end = cuts.ends[piece];
  double sum = 0;
  for (int64_t chunk = start / CHUNK + threadIdx.x; start < end && chunk * CHUNK < end; chunk += THREADS) {
    sum += sums[chunk + piece];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) scales[piece] = sign_scale(sum, end - start, l1);
}

// Packing -----------------------------------------------------------------------------------------

// The signs of N elements, as bits; their errors are stored.
template <int N, class Value>
__device__ __forceinline__ uint32_t signs_of(
    Wanted<Value> wanted, float* error, int64_t i, Place& place, float& scale, const float* scales) {
  auto pack = wanted.template get<N>(i);
  uint32_t signs = 0;
  for (int j = 0; j < N; ++j) {
    if (place.go_to(i + j)) scale = place.padding() ? 0 : scales[place.piece];
    const bool plus = is_plus(pack.at[j]);
    signs |= uint32_t(plus) << j;
    pack.at[j] -= with_sign(scale, plus);
  }
  store(error + i, pack);
  return signs;
}

// Bytes for 32 signs, or fewer at the end.
__device__ __forceinline__ void store_signs(uint8_t* to, uint32_t signs, int64_t count) {
  if (count >= 32 && before_packs<4>(to) == 0) {
    Pack<uint8_t, 4> pack;
    for (int k = 0; k < 4; ++k) pack.at[k] = uint8_t(signs >> 8 * k);
    store(to, pack);
  } else {
    for (int k = 0; k < 4 && 8 * k < count; ++k) to[k] = uint8_t(signs >> 8 * k);
  }
}

template <class Value>
__global__ void __launch_bounds__(THREADS) pack_kernel(
    Wanted<Value> wanted, float* error, int64_t numel, Cuts cuts, const float* scales, uint8_t* packed) {
  constexpr int N = PACK_OF<float, Value>, LANES = 32 / N;  // lanes that fill a word of signs together
  static_assert(CHUNK % 32 == 0, "a chunk begins with a word");
  const int64_t low = int64_t(blockIdx.x) * CHUNK, high = lesser(low + CHUNK, numel);
  const bool packs = span_of<N>(high - low, error + low, wanted.values + low).first == 0;
  Place place(cuts, low);
  float scale = place.padding() ? 0 : scales[place.piece];
  // All lanes of a warp go on until the last has work: they exchange their signs.
  for (int64_t begin = low; begin < high; begin += N * THREADS) {
    const int64_t i = begin + N * threadIdx.x;
    uint32_t signs = 0;
    if (packs && i + N <= high) {
      signs = signs_of<N>(wanted, error, i, place, scale, scales);
    } else {
      for (int j = 0; j < N && i + j < high; ++j) {
        signs |= signs_of<1>(wanted, error, i + j, place, scale, scales) << j;
      }
    }
    const int lane = threadIdx.x % LANES;
    signs <<= N * lane;
    for (int distance = 1; distance < LANES; distance *= 2) signs |= __shfl_xor_sync(ALL_LANES, signs, distance);
    if (lane == 0) store_signs(packed + i / 8, signs, high - i);
  }
}

template <class Value>
void pack(
    Wanted<Value> wanted, float* error, int64_t numel, Cuts cuts, bool l1, uint8_t* packed, float* scales,
    double* sums, Stream stream) {
  const int64_t chunks = chunks_of(numel);
  launch("sign_pack's sums", sums_kernel<Value>, chunks, THREADS, stream, wanted, numel, cuts, l1, sums);
  launch("sign_pack's scales", scales_kernel, cuts.count, THREADS, stream, sums, cuts, l1, scales);
  launch("sign_pack", pack_kernel<Value>, chunks, THREADS, stream, wanted, error, numel, cuts, scales, packed);
}

// Unpacking ---------------------------------------------------------------------------------------

struct Rows {
  const uint8_t* packed;
  const float* scales;
  int64_t count, bytes, pieces;  // bytes and scales of each
  MeanOver over;
  bool words;  // do all rows begin with a word?
};

// The totals become means.
template <int U, int N>
__device__ __forceinline__ void divide(float (&totals)[U][N], const MeanOver& over) {
  bool usual = over.few;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    for (int j = 0; j < N; ++j) usual &= is_usual(totals[u][j]);
  }
  if (usual) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      for (int j = 0; j < N; ++j) totals[u][j] = mean_of_usual(totals[u][j], over);
    }
  } else {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      for (int j = 0; j < N; ++j) totals[u][j] = totals[u][j] / over.count;
    }
  }
}

// The signs of U packs of N elements, STEP apart, in a row: from one word, if all are in it, or from a byte each.
template <int N, int U, int STEP, bool word>
__device__ __forceinline__ void load_signs(const uint8_t* row, int64_t i, uint32_t (&signs)[U]) {
  if constexpr (word) {
    const uint32_t all = *aligned(reinterpret_cast<const uint32_t*>(row + i / 32 * 4));
#pragma unroll
    for (int u = 0; u < U; ++u) signs[u] = all >> (i % 32 + u * STEP);
  } else {
#pragma unroll
    for (int u = 0; u < U; ++u) signs[u] = row[i / 8 + u * (STEP / 8)] >> (i % 8);
  }
}

// The mean of all rows for U packs of N elements, STEP apart; all are of one piece.
template <int N, int U, int STEP, bool word, class Out>
__device__ __forceinline__ void write_mean(const Rows& rows, const Place& place, int64_t i, bool add, Out* out) {
  float totals[U][N] = {};
#pragma unroll 4
  for (int64_t row = 0; row < rows.count && !place.padding(); ++row) {
    const float scale = rows.scales[row * rows.pieces + place.piece];
    uint32_t signs[U];
    load_signs<N, U, STEP, word>(rows.packed + row * rows.bytes, i, signs);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      for (int j = 0; j < N; ++j) totals[u][j] += with_sign(scale, signs[u] >> j & 1);
    }
  }
  divide(totals, rows.over);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    Pack<Out, N> before, pack;
    if (add) before = load<N>(out + i + u * STEP);
    for (int j = 0; j < N; ++j) put_at(pack, j, add ? to_f32(before.at[j]) + totals[u][j] : totals[u][j]);
    store(out + i + u * STEP, pack);
  }
}

template <class Out>
__global__ void __launch_bounds__(THREADS)
    mean_kernel(const __grid_constant__ Rows rows, Cuts cuts, bool add, Out* out, int64_t numel) {
  constexpr int PACK = PACK_OF<Out>, IN_WORD = 16 / PACK;
  const int64_t low = int64_t(blockIdx.x) * CHUNK, high = lesser(low + CHUNK, numel);
  const Span span = span_of<PACK>(high - low, out + low);
  Place place(cuts, low);
  int64_t single = low;
  if (place.end >= high && span.first == 0) {  // no pack begins within a byte's half
    if (rows.words) {
      // Two threads share a word: each store of both fills 32 bytes.
      single = high - high % 32;
      const int64_t first = low + threadIdx.x / 2 * 32 + threadIdx.x % 2 * PACK;
      for (int64_t i = first; i < single; i += THREADS / 2 * 32) {
        write_mean<PACK, IN_WORD, 2 * PACK, true>(rows, place, i, add, out);
      }
    } else {
      single = high;
      sweep<PACK>(span, threadIdx.x, [&](auto take, int i) {
        write_mean<decltype(take)::N, 1, 0, false>(rows, place, low + i, add, out);
      });
    }
  }
  for (int64_t i = single + threadIdx.x; i < high; i += THREADS) {
    place.go_to(i);
    write_mean<1, 1, 0, false>(rows, place, i, add, out);
  }
}

template <class Out>
void unpack_mean(
    const uint8_t* packed, const float* scales, int64_t rows, Cuts cuts, void* out, int64_t numel, bool add,
    Stream stream) {
  const int64_t bytes = (numel + 7) / 8;
  const bool words = reinterpret_cast<uintptr_t>(packed) % 4 == 0 && (bytes % 4 == 0 || rows == 1);
  launch(
      "sign_unpack_mean", mean_kernel<Out>, chunks_of(numel), THREADS, stream,
      Rows{packed, scales, rows, bytes, cuts.count, mean_over(rows), words}, cuts, add, static_cast<Out*>(out), numel);
}

}  // namespace

void sign_pack(
    const void* values, Type type, float* error, int64_t numel, Cuts cuts, bool l1, uint8_t* packed, float* scales,
    double* workspace, Stream stream) {
  const auto with = [&](auto value) {
    using Value = decltype(value);
    const Wanted<Value> wanted{static_cast<const Value*>(values), error};
    pack(wanted, error, numel, cuts, l1, packed, scales, workspace, stream);
  };
  if (values == nullptr) return with(nothing{});
  if (type == Type::bf16) return with(bf16{});
  if (type == Type::f16) return with(f16{});
  with(float{});
}

void sign_unpack_mean(
    const uint8_t* packed, const float* scales, int64_t chunks, Cuts cuts, void* out, Type type, int64_t numel,
    bool add, Stream stream) {
  if (type == Type::bf16) return unpack_mean<bf16>(packed, scales, chunks, cuts, out, numel, add, stream);
  if (type == Type::f16) return unpack_mean<f16>(packed, scales, chunks, cuts, out, numel, add, stream);
  unpack_mean<float>(packed, scales, chunks, cuts, out, numel, add, stream);
}

int64_t sign_workspace(int64_t numel, int64_t pieces) { return chunks_of(numel) + pieces; }

}  // namespace zf::cuda
