// quantize_blocks and dequantize_blocks: see core/functions.h.
//
// Work is split at every second block: there four-bit integers begin with a byte, whatever a block's size is.
#include "../core/quantize.h"

#include "isa.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 14;  // numbers: what is worth another thread
static const int64_t RUN = 512;        // integers, whole bytes: what is in work at once

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

struct Block {
  int64_t i, j;               // its row
  int64_t low, high, number;  // its numbers in the row, and how many blocks are before it
};

// `body(block)` for all blocks.
template <class Body>
static void each_block(const BlockRows& rows, int64_t block, const Body& body) {
  if (rows.numel == 0) return;
  const int64_t numel = rows.numel, columns = rows.counts[1], size = lesser(block, numel);
  const int64_t blocks = (numel + size - 1) / size, pairs = (blocks + 1) / 2, grain = GRAIN / (2 * size);
  auto range = [=](int64_t low, int64_t high) {
    for (int64_t pair = low; pair < high; ++pair) {
      const int64_t row = pair / pairs, first = pair % pairs * 2;
      for (int64_t k = first; k < lesser(first + 2, blocks); ++k) {
        body(Block{row / columns, row % columns, k * size, lesser((k + 1) * size, numel), k});
      }
    }
  };
  parallel_for(rows.counts[0] * columns * pairs, grain > 0 ? grain : 1, range);
}

// How far behind the first row a block's row begins.
static int64_t start(const int64_t (&apart)[2], const Block& block) { return block.i * apart[0] + block.j * apart[1]; }

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
static void quantize(const Number* all, const BlockRows& rows, uint8_t* payloads, int bits, int64_t block) {
  each_block(rows, block, [=](const Block& b) {
    const Number* numbers = all + start(rows.numbers, b);
    uint8_t* payload = payloads + start(rows.payloads, b);
    const int64_t size = b.high - b.low;
    const float scale = block_scale(reach_of(numbers + b.low, size), largest_integer(bits));
    store_scale(payload + integer_bytes(rows.numel, bits), b.number, scale);
    int8_t integers[RUN];
    for (int64_t i = b.low; i < b.high; i += RUN) {
      const int64_t n = lesser(RUN, b.high - i);
      fetch(numbers + i + size, n);
      to_integers(numbers + i, n, scale, bits == 8 ? reinterpret_cast<int8_t*>(payload) + i : integers);
      if (bits == 4) pack(integers, i, n, payload);
    }
  });
}

void quantize_blocks(
    const void* numbers, Type type, const BlockRows& rows, uint8_t* payloads, int bits, int64_t block, Stream) {
  if (type == Type::bf16) return quantize(static_cast<const bf16*>(numbers), rows, payloads, bits, block);
  if (type == Type::f16) return quantize(static_cast<const f16*>(numbers), rows, payloads, bits, block);
  quantize(static_cast<const float*>(numbers), rows, payloads, bits, block);
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

// What a payload has for the n numbers from i on, written or added to `to`.
template <class To>
static void take(const uint8_t* payload, int64_t i, int64_t n, int bits, float scale, bool add, To* to) {
  if (bits == 8) return to_numbers(reinterpret_cast<const int8_t*>(payload) + i, n, scale, add, to);
  int8_t integers[RUN];
  unpack(payload, i, n, integers);
  to_numbers(integers, n, scale, add, to);
}

template <class Out>
static void dequantize(const uint8_t* payloads, Out* all, const BlockRows& rows, int bits, int64_t block, bool add) {
  const int64_t scales = integer_bytes(rows.numel, bits);
  each_block(rows, block, [=](const Block& b) {
    Out* out = all + start(rows.numbers, b);
    for (int64_t i = b.low; i < b.high; i += RUN) {
      const int64_t n = lesser(RUN, b.high - i);
      for (int64_t term = 0; term < rows.terms; ++term) {
        const uint8_t* payload = payloads + start(rows.payloads, b) + term * rows.apart;
        take(payload, i, n, bits, load_scale(payload + scales, b.number), add || term > 0, out + i);
      }
    }
  });
}

void dequantize_blocks(
    const uint8_t* payloads, void* out, Type type, const BlockRows& rows, int bits, int64_t block, bool add,
    Stream) {
  if (type == Type::bf16) return dequantize(payloads, static_cast<bf16*>(out), rows, bits, block, add);
  if (type == Type::f16) return dequantize(payloads, static_cast<f16*>(out), rows, bits, block, add);
  dequantize(payloads, static_cast<float*>(out), rows, bits, block, add);
}

}  // namespace zf::cpu::ZF_ISA
