// quantize_blocks and dequantize_blocks: see core/functions.h.
//
// A team of threads, a warp or more, takes a unit of numbers: one block, or two if the block's size is odd and
// there are two integers to a byte. So no byte is shared by teams. Blocks of thousands of numbers are
// what it is made for: one of millions comes out right, but the other teams wait for it.
#include "../core/quantize.h"

#include "reduce.h"
#include "stream.h"

namespace zf::cuda {
#include "../core/functions.h"

namespace {

constexpr int TEAM = THREADS / 2;  // for large blocks; it is a whole thread block
constexpr int SMALL = 8 * WARP;    // up to so many numbers are a block for a warp

// Integers of `bits`, so many in a byte.
template <int bits>
constexpr int IN_BYTE = 8 / bits;

struct Layout {
  int64_t numel, block, unit, scales;  // `scales`: where they begin in the payload
};

template <int bits>
Layout layout_of(int64_t numel, int64_t block) {
  const int64_t size = lesser(block, numel);  // so that twice as many can be counted
  return {numel, size, size % IN_BYTE<bits> == 0 ? size : 2 * size, integer_bytes(numel, bits)};
}

// The numbers [low, high) that a team takes; a second block begins at `middle` if that is not `high`.
struct Unit {
  int64_t low, middle, high, first_block;
};

template <int team>
__device__ __forceinline__ Unit unit_of(const Layout& layout) {
  const int64_t index = blockIdx.x * int64_t(blockDim.x / team) + threadIdx.x / team, low = index * layout.unit;
  const int64_t high = lesser(low + layout.unit, layout.numel);
  return {low, lesser(low + layout.block, high), high, index * (layout.unit / layout.block)};
}

struct Scales {
  int64_t middle;
  float first, second;

  __device__ __forceinline__ float at(int64_t i) const { return i < middle ? first : second; }
};

// `body(span, low)` for parts of [low, high): a span counts with 32 bits. It counts groups of the numbers that
// are a byte, and the last group may be incomplete.
template <int bits, class T, class Body>
__device__ __forceinline__ void for_parts(const T* numbers, int64_t low, int64_t high, const Body& body) {
  constexpr int GROUP = IN_BYTE<bits>, N = PACK_OF<T> / GROUP;
  struct Group {
    T at[GROUP];
  };
  for (; low < high; low += CHUNK) {
    const int size = int(lesser(CHUNK, high - low));
    Span span = span_of<N>(size / GROUP, reinterpret_cast<const Group*>(numbers + low));
    span.size = (size + GROUP - 1) / GROUP;
    body(span, low);
  }
}

// Bytes beside each other; the address may be any.
template <int N>
__device__ __forceinline__ void store_bytes(uint8_t* to, const Pack<uint8_t, N>& bytes) {
  if (before_packs<N>(to) == 0) return store(to, bytes);
  for (int k = 0; k < N; ++k) to[k] = bytes.at[k];
}

template <int N>
__device__ __forceinline__ Pack<uint8_t, N> load_bytes(const uint8_t* from) {
  if (before_packs<N>(from) == 0) return load<N>(from);
  Pack<uint8_t, N> bytes;
  for (int k = 0; k < N; ++k) bytes.at[k] = from[k];
  return bytes;
}

// Numbers to integers -----------------------------------------------------------------------------

// All threads of the team get it.
template <int bits, int team, class T>
__device__ __forceinline__ float scale_of(const T* numbers, int64_t low, int64_t high) {
  constexpr int PACK = PACK_OF<T>, AT_ONCE = 16 / PACK;
  uint32_t reach = 0;
  for_parts<8>(numbers, low, high, [&](Span span, int64_t begin) {
    sweep<PACK, AT_ONCE, team>(span, threadIdx.x % team, [&](auto take, int i) {
      constexpr int N = decltype(take)::N, U = decltype(take)::U, STEP = decltype(take)::STEP;
      Pack<T, N> packs[U];
#pragma unroll
      for (int u = 0; u < U; ++u) packs[u] = load<N>(numbers + begin + i + u * STEP);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        for (int j = 0; j < N; ++j) reach = Most{}(reach, size_bits(to_f32(packs[u].at[j])));
      }
    });
  });
  if constexpr (team == WARP) {
    reach = warp_reduce(reach, Most{});
  } else {
    reach = block_reduce<team>(reach, 0u, Most{});
  }
  return block_scale(reach, largest_integer(bits));
}

template <int bits, int N>
__device__ __forceinline__ Pack<uint8_t, N / IN_BYTE<bits>> bytes_of(const int8_t (&integers)[N]) {
  Pack<uint8_t, N / IN_BYTE<bits>> bytes;
  for (int k = 0; k < N / IN_BYTE<bits>; ++k) {
    bytes.at[k] = bits == 8 ? uint8_t(integers[k]) : pack_halves(integers[2 * k], integers[2 * k + 1]);
  }
  return bytes;
}

template <class T, int bits, int team>
__global__ void __launch_bounds__(THREADS) quantize_kernel(Layout layout, const T* numbers, uint8_t* payload) {
  const Unit unit = unit_of<team>(layout);
  if (unit.low >= layout.numel) return;  // the whole team
  const bool two = unit.middle < unit.high;
  Scales scales{unit.middle, scale_of<bits, team>(numbers, unit.low, unit.middle), 0};
  if (two) scales.second = scale_of<bits, team>(numbers, unit.middle, unit.high);
  if (threadIdx.x % team == 0) {
    store_scale(payload + layout.scales, unit.first_block, scales.first);
    if (two) store_scale(payload + layout.scales, unit.first_block + 1, scales.second);
  }
  constexpr int GROUP = IN_BYTE<bits>;
  for_parts<bits>(numbers, unit.low, unit.high, [&](Span span, int64_t begin) {
    sweep<PACK_OF<T> / GROUP, 1, team>(span, threadIdx.x % team, [&](auto take, int group) {
      constexpr int N = decltype(take)::N * GROUP;
      const int64_t i = begin + group * GROUP;
      Pack<T, N> pack{};
      if constexpr (N > GROUP) {
        pack = load<N>(numbers + i);
      } else {
        for (int j = 0; j < N && i + j < unit.high; ++j) pack.at[j] = numbers[i + j];
      }
      int8_t integers[N];
      for (int j = 0; j < N; ++j) integers[j] = to_integer(to_f32(pack.at[j]), scales.at(i + j));
      store_bytes(payload + i / GROUP, bytes_of<bits>(integers));
    });
  });
}

// Integers to numbers -----------------------------------------------------------------------------

template <int bits>
__device__ __forceinline__ int8_t integer_at(const uint8_t* bytes, int i) {
  if constexpr (bits == 8) return int8_t(bytes[i]);
  return i % 2 == 0 ? low_half(bytes[i / 2]) : high_half(bytes[i / 2]);
}

template <class T, int bits, int team>
__global__ void __launch_bounds__(THREADS)
    dequantize_kernel(Layout layout, const uint8_t* payload, T* out, bool add) {
  const Unit unit = unit_of<team>(layout);
  if (unit.low >= layout.numel) return;
  Scales scales{unit.middle, load_scale(payload + layout.scales, unit.first_block), 0};
  if (unit.middle < unit.high) scales.second = load_scale(payload + layout.scales, unit.first_block + 1);
  const auto number_at = [&](int64_t i, int8_t integer, float before) {
    const float x = from_integer(integer, scales.at(i));
    return add ? before + x : x;
  };
  constexpr int GROUP = IN_BYTE<bits>, PACK = PACK_OF<T>;
  for_parts<bits>(out, unit.low, unit.high, [&](Span span, int64_t begin) {
    sweep<PACK / GROUP, 16 / PACK, team>(span, threadIdx.x % team, [&](auto take, int group) {
      constexpr int BYTES = decltype(take)::N, U = decltype(take)::U, STEP = decltype(take)::STEP;
      constexpr int N = BYTES * GROUP;
      const int64_t i = begin + group * GROUP;
      Pack<uint8_t, BYTES> bytes[U];
#pragma unroll
      for (int u = 0; u < U; ++u) bytes[u] = load_bytes<BYTES>(payload + i / GROUP + u * STEP);
      if constexpr (BYTES == 1) {
        for (int j = 0; j < N && i + j < unit.high; ++j) {
          put(out[i + j], number_at(i + j, integer_at<bits>(bytes[0].at, j), to_f32(out[i + j])));
        }
      } else {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int64_t low = i + u * STEP * GROUP;
          Pack<T, N> pack{};
          if (add) pack = load<N>(out + low);
          for (int j = 0; j < N; ++j) {
            put_at(pack, j, number_at(low + j, integer_at<bits>(bytes[u].at, j), to_f32(pack.at[j])));
          }
          store(out + low, pack);
        }
      }
    });
  });
}

// Launching ---------------------------------------------------------------------------------------

// `body(number type, bits, team)`, all as types.
template <class Body>
void choose(Type type, int bits, int64_t block, const Body& body) {
  const auto with_team = [&](auto number, auto bits) {
    if (block <= SMALL) return body(number, bits, std::integral_constant<int, WARP>{});
    body(number, bits, std::integral_constant<int, TEAM>{});
  };
  const auto with_bits = [&](auto number) {
    if (bits == 8) return with_team(number, std::integral_constant<int, 8>{});
    with_team(number, std::integral_constant<int, 4>{});
  };
  if (type == Type::bf16) return with_bits(bf16{});
  if (type == Type::f16) return with_bits(f16{});
  with_bits(float{});
}

template <class Kernel, class... Arguments>
void launch_teams(
    const char* name, Kernel kernel, int team, const Layout& layout, Stream stream,
    const Arguments&... arguments) {
  const int threads = team == WARP ? THREADS : team, teams = threads / team;
  const int64_t units = (layout.numel + layout.unit - 1) / layout.unit;
  launch(name, kernel, (units + teams - 1) / teams, threads, stream, layout, arguments...);
}

}  // namespace

void quantize_blocks(
    const void* numbers, Type type, int64_t numel, uint8_t* payload, int bits, int64_t block, Stream stream) {
  if (numel == 0) return;
  choose(type, bits, block, [&](auto number, auto bits, auto team) {
    using T = decltype(number);
    const auto kernel = &quantize_kernel<T, bits.value, team.value>;
    const Layout layout = layout_of<bits.value>(numel, block);
    launch_teams("quantize_blocks", kernel, team, layout, stream, static_cast<const T*>(numbers), payload);
  });
}

void dequantize_blocks(
    const uint8_t* payload, void* out, Type type, int64_t numel, int bits, int64_t block, bool add,
    Stream stream) {
  if (numel == 0) return;
  choose(type, bits, block, [&](auto number, auto bits, auto team) {
    using T = decltype(number);
    const auto kernel = &dequantize_kernel<T, bits.value, team.value>;
    const Layout layout = layout_of<bits.value>(numel, block);
    launch_teams("dequantize_blocks", kernel, team, layout, stream, payload, static_cast<T*>(out), add);
  });
}

}  // namespace zf::cuda
