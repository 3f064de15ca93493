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
  BlockRows rows;
  int64_t block, unit, scales;  // `scales`: where they begin in a payload
};

template <int bits>
Layout layout_of(const BlockRows& rows, int64_t block) {
  const int64_t size = lesser(block, rows.numel);  // so that twice as many can be counted
  const bool whole_bytes = size % IN_BYTE<bits> == 0 || size == rows.numel;
  return {rows, size, whole_bytes ? size : 2 * size, integer_bytes(rows.numel, bits)};
}

// How far behind the first row that of this thread block begins.
__device__ __forceinline__ int64_t row_start(const int64_t (&apart)[2]) {
  return blockIdx.z * apart[0] + blockIdx.y * apart[1];
}

// The numbers [low, high) of a row that a team takes; a second block begins at `middle` if that is not `high`.
struct Unit {
  int64_t low, middle, high, first_block;
};

template <int team, bool two>
__device__ __forceinline__ Unit unit_of(const Layout& layout) {
  const int64_t index = blockIdx.x * int64_t(blockDim.x / team) + threadIdx.x / team, low = index * layout.unit;
  const int64_t high = lesser(low + layout.unit, layout.rows.numel);
  return {low, two ? lesser(low + layout.block, high) : high, high, two ? 2 * index : index};
}

// Of a unit's blocks.
template <bool two>
struct Scales {
  int64_t middle;
  float first, second;

  __device__ __forceinline__ float at(int64_t i) const { return !two || i < middle ? first : second; }
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

template <class T, int bits, int team, bool two>
__global__ void __launch_bounds__(THREADS)
    quantize_kernel(const __grid_constant__ Layout layout, const T* first_row, uint8_t* first_payload) {
  const Unit unit = unit_of<team, two>(layout);
  if (unit.low >= layout.rows.numel) return;  // the whole team
  const T* numbers = first_row + row_start(layout.rows.numbers);
  uint8_t* payload = first_payload + row_start(layout.rows.payloads);
  Scales<two> scales{unit.middle, scale_of<bits, team>(numbers, unit.low, unit.middle), 0};
  const bool second = two && unit.middle < unit.high;
  if (second) scales.second = scale_of<bits, team>(numbers, unit.middle, unit.high);
  if (threadIdx.x % team == 0) {
    store_scale(payload + layout.scales, unit.first_block, scales.first);
    if (second) store_scale(payload + layout.scales, unit.first_block + 1, scales.second);
  }
  const Divisor divisor = divisor_of(scales.first);
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
      if (!two && divisor.usual) {
        for (int j = 0; j < N; ++j) integers[j] = to_integer(to_f32(pack.at[j]), divisor);
      } else {
        for (int j = 0; j < N; ++j) integers[j] = to_integer(to_f32(pack.at[j]), scales.at(i + j));
      }
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

template <bool two>
__device__ __forceinline__ Scales<two> scales_at(const uint8_t* scales, const Unit& unit) {
  Scales<two> found{unit.middle, load_scale(scales, unit.first_block), 0};
  if (two && unit.middle < unit.high) found.second = load_scale(scales, unit.first_block + 1);
  return found;
}

// `many`: the payloads of a row are added up.
template <class T, int bits, int team, bool two, bool many>
__global__ void __launch_bounds__(THREADS) dequantize_kernel(
    const __grid_constant__ Layout layout, const uint8_t* first_payload, T* first_row, bool add) {
  const Unit unit = unit_of<team, two>(layout);
  if (unit.low >= layout.rows.numel) return;
  T* out = first_row + row_start(layout.rows.numbers);
  const uint8_t* payload = first_payload + row_start(layout.rows.payloads);
  const Scales<two> first_scales = scales_at<two>(payload + layout.scales, unit);
  constexpr int GROUP = IN_BYTE<bits>, PACK = PACK_OF<T>, AT_ONCE = two || many ? 1 : 16 / PACK;
  for_parts<bits>(out, unit.low, unit.high, [&](Span span, int64_t begin) {
    sweep<PACK / GROUP, AT_ONCE, team>(span, threadIdx.x % team, [&](auto take, int group) {
      constexpr int BYTES = decltype(take)::N, U = decltype(take)::U, STEP = decltype(take)::STEP;
      constexpr int N = BYTES * GROUP;
      const int64_t i = begin + group * GROUP;
      const auto there = [&](int j) { return BYTES > 1 || i + j < unit.high; };  // the last byte may have one number
      Pack<uint8_t, BYTES> bytes[U];
#pragma unroll
      for (int u = 0; u < U; ++u) bytes[u] = load_bytes<BYTES>(payload + i / GROUP + u * STEP);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t low = i + u * STEP * GROUP;
        Pack<T, N> before{}, pack{};
        if constexpr (BYTES > 1) {
          if (add) before = load<N>(out + low);
        } else {
          for (int j = 0; j < N && add && there(j); ++j) before.at[j] = out[low + j];
        }
        float totals[N];
        for (int j = 0; j < N; ++j) {
          const float x = from_integer(integer_at<bits>(bytes[u].at, j), first_scales.at(low + j));
          totals[j] = add ? to_f32(before.at[j]) + x : x;
        }
        for (int64_t term = 1; many && term < layout.rows.terms; ++term) {
          const uint8_t* from = payload + term * layout.rows.apart;
          const Scales<two> scales = scales_at<two>(from + layout.scales, unit);
          const auto more = load_bytes<BYTES>(from + low / GROUP);
          for (int j = 0; j < N; ++j) totals[j] += from_integer(integer_at<bits>(more.at, j), scales.at(low + j));
        }
        if constexpr (BYTES > 1) {
          for (int j = 0; j < N; ++j) put_at(pack, j, totals[j]);
          store(out + low, pack);
        } else {
          for (int j = 0; j < N && there(j); ++j) put(out[low + j], totals[j]);
        }
      }
    });
  });
}

// Launching ---------------------------------------------------------------------------------------

// `body(number type, bits, team, whether a unit has two blocks)`, all as types.
template <class Body>
void choose(Type type, int bits, int64_t block, int64_t numel, const Body& body) {
  const auto with_unit = [&](auto number, auto bits, auto team) {
    constexpr bool odd_blocks_share_bytes = bits.value == 4;
    if constexpr (odd_blocks_share_bytes) {
      if (block % 2 == 1 && block < numel) return body(number, bits, team, std::true_type{});
    }
    body(number, bits, team, std::false_type{});
  };
  const auto with_team = [&](auto number, auto bits) {
    if (block <= SMALL) return with_unit(number, bits, std::integral_constant<int, WARP>{});
    with_unit(number, bits, std::integral_constant<int, TEAM>{});
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
  const int64_t units = (layout.rows.numel + layout.unit - 1) / layout.unit;
  const Grid grid{(units + teams - 1) / teams, layout.rows.counts[1], layout.rows.counts[0]};
  launch(name, kernel, grid, threads, stream, layout, arguments...);
}

}  // namespace

void quantize_blocks(
    const void* numbers, Type type, const BlockRows& rows, uint8_t* payloads, int bits, int64_t block, Stream stream) {
  if (rows.numel == 0) return;
  choose(type, bits, block, rows.numel, [&](auto number, auto bits, auto team, auto two) {
    using T = decltype(number);
    const auto kernel = &quantize_kernel<T, bits.value, team.value, two.value>;
    const Layout layout = layout_of<bits.value>(rows, block);
    launch_teams("quantize_blocks", kernel, team, layout, stream, static_cast<const T*>(numbers), payloads);
  });
}

void dequantize_blocks(
    const uint8_t* payloads, void* out, Type type, const BlockRows& rows, int bits, int64_t block, bool add,
    Stream stream) {
  if (rows.numel == 0) return;
  choose(type, bits, block, rows.numel, [&](auto number, auto bits, auto team, auto two) {
    using T = decltype(number);
    const Layout layout = layout_of<bits.value>(rows, block);
    const auto launch_it = [&](auto kernel) {
      launch_teams("dequantize_blocks", kernel, team, layout, stream, payloads, static_cast<T*>(out), add);
    };
    if constexpr (std::is_same_v<T, float>) {  // terms are added up in no other type
      if (rows.terms > 1) return launch_it(&dequantize_kernel<T, bits.value, team.value, two.value, true>);
    }
    launch_it(&dequantize_kernel<T, bits.value, team.value, two.value, false>);
  });
}

}  // namespace zf::cuda
