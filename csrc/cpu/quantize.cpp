// quantize_blocks and dequantize_blocks: see core/functions.h.
//
// Work is split at every second block: there four-bit integers begin with a byte, whatever a block's size is.
#include "../core/quantize.h"

#include "isa.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 14;  // numbers: what is worth another thread
static const int64_t RUN = 512;        // integers, whole bytes: what is in work at once

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// `body(low, high, number)` for the blocks.
template <class Body>
static void each_block(int64_t numel, int64_t block, const Body& body) {
  if (numel == 0) return;
  const int64_t size = lesser(block, numel), pairs = GRAIN / (2 * size);
  auto range = [=](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; ++i) body(i * size, lesser((i + 1) * size, numel), i);
  };
  parallel_for((numel + size - 1) / size, pairs > 0 ? 2 * pairs : 2, range);
}

// Numbers to integers -----------------------------------------------------------------------------

template <class Number>
static uint32_t reach_of(const Number* numbers, int64_t n) {
  uint32_t reach = 0;
#pragma omp simd reduction(max : reach)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = size_bits(to_f32(numbers[i]));
    reach = size > reach ? size : reach;
  }
  return reach;
}

template <class Number>
static void to_integers(const Number* numbers, int64_t n, float scale, int8_t* integers) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) integers[i] = to_integer(to_f32(numbers[i]), scale);
}

// Of the numbers from `low` on, which may be in the middle of a byte. Then its low half is there already.
static void pack(const int8_t* integers, int64_t low, int64_t n, uint8_t* packed) {
  uint8_t* to = packed + low / 2;
  if (low % 2 == 1 && n > 0) {
    *to = uint8_t(*to | pack_halves(0, integers[0]));
    ++to, ++integers, --n;
  }
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) to[i] = pack_halves(integers[2 * i], integers[2 * i + 1]);
  if (n % 2 == 1) to[n / 2] = pack_halves(integers[n - 1], 0);
}

// What is needed next is fetched while numbers are divided.
template <class Number>
static void fetch(const Number* numbers, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(numbers + i);
}

template <class Number>
static void quantize(const Number* numbers, int64_t numel, uint8_t* payload, int bits, int64_t block) {
  uint8_t* scales = payload + integer_bytes(numel, bits);
  each_block(numel, block, [=](int64_t low, int64_t high, int64_t number) {
    const float scale = block_scale(reach_of(numbers + low, high - low), largest_integer(bits));
    store_scale(scales, number, scale);
    int8_t integers[RUN];
    for (int64_t i = low; i < high; i += RUN) {
      const int64_t n = lesser(RUN, high - i);
      fetch(numbers + i + high - low, n);
      to_integers(numbers + i, n, scale, bits == 8 ? reinterpret_cast<int8_t*>(payload) + i : integers);
      if (bits == 4) pack(integers, i, n, payload);
    }
  });
}

void quantize_blocks(
    const void* numbers, Type type, int64_t numel, uint8_t* payload, int bits, int64_t block, Stream) {
  if (type == Type::bf16) return quantize(static_cast<const bf16*>(numbers), numel, payload, bits, block);
  if (type == Type::f16) return quantize(static_cast<const f16*>(numbers), numel, payload, bits, block);
  quantize(static_cast<const float*>(numbers), numel, payload, bits, block);
}

// Integers to numbers -----------------------------------------------------------------------------

static void unpack(const uint8_t* packed, int64_t low, int64_t n, int8_t* integers) {
  const uint8_t* from = packed + low / 2;
  if (low % 2 == 1 && n > 0) {
    *integers = high_half(*from);
    ++from, ++integers, --n;
  }
#pragma omp simd
  for (int64_t i = 0; i < n / 2; ++i) {
    integers[2 * i] = low_half(from[i]);
    integers[2 * i + 1] = high_half(from[i]);
  }
  if (n % 2 == 1) integers[n - 1] = low_half(from[n / 2]);
}

template <class Out>
static void to_numbers(const int8_t* integers, int64_t n, float scale, bool add, Out* out) {
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) put(out[i], to_f32(out[i]) + from_integer(integers[i], scale));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) put(out[i], from_integer(integers[i], scale));
  }
}

template <class Out>
static void dequantize(const uint8_t* payload, Out* out, int64_t numel, int bits, int64_t block, bool add) {
  const uint8_t* scales = payload + integer_bytes(numel, bits);
  each_block(numel, block, [=](int64_t low, int64_t high, int64_t number) {
    const float scale = load_scale(scales, number);
    if (bits == 8) {
      return to_numbers(reinterpret_cast<const int8_t*>(payload) + low, high - low, scale, add, out + low);
    }
    int8_t integers[RUN];
    for (int64_t i = low; i < high; i += RUN) {
      const int64_t n = lesser(RUN, high - i);
      unpack(payload, i, n, integers);
      to_numbers(integers, n, scale, add, out + i);
    }
  });
}

void dequantize_blocks(
    const uint8_t* payload, void* out, Type type, int64_t numel, int bits, int64_t block, bool add, Stream) {
  if (type == Type::bf16) return dequantize(payload, static_cast<bf16*>(out), numel, bits, block, add);
  if (type == Type::f16) return dequantize(payload, static_cast<f16*>(out), numel, bits, block, add);
  dequantize(payload, static_cast<float*>(out), numel, bits, block, add);
}

}  // namespace zf::cpu::ZF_ISA
