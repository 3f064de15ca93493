// sign_pack and sign_unpack_mean: see core/functions.h.
//
// Pieces may end inside a byte. So a stretch of one piece is done bit by bit up to its first whole byte and from
// its last, and byte by byte between.
#include "../core/sign.h"

#include "bits.h"
#include "sums.h"

namespace zf::cpu::ZF_ISA {

static const int64_t GRAIN = 1 << 14;  // elements, whole bytes: what is added up at once, by one thread
static const int64_t RUN = 512;        // elements, whole bytes: what is in work at once
static const int64_t AHEAD = 1024;     // elements: what memory is asked for meanwhile

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// `body(piece, a, b)` for [low, high), cut where pieces and grains end. In the padding `piece` is cuts.count.
template <class Body>
static void each_cut(Cuts cuts, int64_t low, int64_t high, const Body& body) {
  int64_t piece = 0;
  while (low < high) {
    while (piece < cuts.count && cuts.ends[piece] <= low) ++piece;
    const int64_t end = lesser((low / GRAIN + 1) * GRAIN, high);
    const int64_t b = piece < cuts.count ? lesser(cuts.ends[piece], end) : end;
    body(piece, low, b);
    low = b;
  }
}

static int64_t up_to_byte(int64_t i) { return (i + 7) / 8 * 8; }

// What is wanted.
template <class Value>
struct Sum {
  const Value* values;
  const float* error;
  float operator[](int64_t i) const { return to_f32(values[i]) + error[i]; }
  void fetch(int64_t i) const {
    __builtin_prefetch(values + i);
    __builtin_prefetch(error + i);
  }
};

struct Alone {
  const float* error;
  float operator[](int64_t i) const { return error[i]; }
  void fetch(int64_t i) const { __builtin_prefetch(error + i); }
};

// `body` is told what is wanted.
template <class Body>
static void with_wanted(const void* values, Type type, const float* error, const Body& body) {
  if (values == nullptr) return body(Alone{error});
  if (type == Type::bf16) return body(Sum<bf16>{static_cast<const bf16*>(values), error});
  if (type == Type::f16) return body(Sum<f16>{static_cast<const f16*>(values), error});
  body(Sum<float>{static_cast<const float*>(values), error});
}

// Scales ------------------------------------------------------------------------------------------

template <bool l1, class Wanted>
static double add_up(Wanted wanted, int64_t low, int64_t high) {
  double lanes[LANES] = {};
  int64_t i = low;
  for (; i + LANES <= high; i += LANES) {
    wanted.fetch(i + AHEAD);
#pragma omp simd
    for (int64_t k = 0; k < LANES; ++k) lanes[k] += sign_weight(wanted[i + k], l1);
  }
  for (int64_t k = 0; i + k < high; ++k) lanes[k] += sign_weight(wanted[i + k], l1);
  return in_total(lanes);
}

// The part of piece p in grain g has its sum in sums[g + p]: one of the two grows at each cut.
template <class Wanted>
static void add_up_stretches(Wanted wanted, int64_t numel, Cuts cuts, bool l1, double* sums) {
  auto body = [=](int64_t low, int64_t high) {
    each_cut(cuts, low, high, [=](int64_t piece, int64_t a, int64_t b) {
      if (piece == cuts.count) return;
      sums[a / GRAIN + piece] = l1 ? add_up<true>(wanted, a, b) : add_up<false>(wanted, a, b);
    });
  };
  parallel_for(numel, GRAIN, body);
}

static void set_scales(const double* sums, Cuts cuts, bool l1, float* scales) {
  int64_t start = 0;
  for (int64_t piece = 0; piece < cuts.count; ++piece) {
    const int64_t end = cuts.ends[piece];
    double total = 0;
    for (int64_t i = start; i < end; i = (i / GRAIN + 1) * GRAIN) total += sums[i / GRAIN + piece];
    scales[piece] = sign_scale(total, end - start, l1);
    start = end;
  }
}

int64_t sign_workspace(int64_t numel, int64_t pieces) { return (numel + GRAIN - 1) / GRAIN + pieces; }

// Packing -----------------------------------------------------------------------------------------

template <class Wanted>
static void pack_bits(Wanted wanted, float* error, int64_t low, int64_t high, float scale, uint8_t* packed) {
  for (int64_t i = low; i < high; ++i) {
    const float x = wanted[i];
    const bool plus = is_plus(x);
    packed[i / 8] = uint8_t((i % 8 == 0 ? 0 : packed[i / 8]) | plus << i % 8);
    error[i] = x - with_sign(scale, plus);
  }
}

template <class Wanted>
static void pack_bytes(Wanted wanted, float* error, int64_t low, int64_t high, float scale, uint8_t* packed) {
  uint8_t flags[RUN];
  for (int64_t start = low; start < high; start += RUN) {
    const int64_t n = lesser(RUN, high - start);
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      const float x = wanted[start + k];
      flags[k] = is_plus(x);
      error[start + k] = x - with_sign(scale, is_plus(x));
    }
    for (int64_t k = 0; k < n; k += 8) {
      packed[(start + k) / 8] = gather_bits(flags + k);
      wanted.fetch(start + k + AHEAD);
    }
  }
}

template <class Wanted>
static void pack(Wanted wanted, float* error, int64_t numel, Cuts cuts, const float* scales, uint8_t* packed) {
  auto body = [=](int64_t low, int64_t high) {
    each_cut(cuts, low, high, [=](int64_t piece, int64_t a, int64_t b) {
      const float scale = piece < cuts.count ? scales[piece] : 0;
      const int64_t first = lesser(up_to_byte(a), b), last = first + (b - first) / 8 * 8;
      pack_bits(wanted, error, a, first, scale, packed);
      pack_bytes(wanted, error, first, last, scale, packed);
      pack_bits(wanted, error, last, b, scale, packed);
    });
  };
  parallel_for(numel, GRAIN, body);
}

void sign_pack(
    const void* values, Type type, float* error, int64_t numel, Cuts cuts, bool l1, uint8_t* packed, float* scales,
    double* workspace, Stream) {
  with_wanted(values, type, error, [=](auto wanted) {
    add_up_stretches(wanted, numel, cuts, l1, workspace);
    set_scales(workspace, cuts, l1, scales);
    pack(wanted, error, numel, cuts, scales, packed);
  });
}

// Unpacking ---------------------------------------------------------------------------------------

static void add_bits(const uint8_t* packed, float scale, int64_t low, int64_t high, float* totals) {
  for (int64_t i = low; i < high; ++i) totals[i - low] += with_sign(scale, bit_of(packed, i));
}

// The bits of a byte become eight bytes, 0 or not.
static void spread_bits(uint8_t byte, uint8_t* flags) {
  const uint64_t all = byte * 0x0101010101010101u & 0x8040201008040201u;
  memcpy(flags, &all, sizeof all);
}

static void add_bytes(const uint8_t* packed, float scale, int64_t bytes, float* totals) {
  uint8_t flags[RUN];
  for (int64_t i = 0; i < bytes; ++i) spread_bits(packed[i], flags + 8 * i);
#pragma omp simd
  for (int64_t k = 0; k < 8 * bytes; ++k) totals[k] += with_sign(scale, flags[k] != 0);
}

static void add_signs(const uint8_t* packed, float scale, int64_t low, int64_t high, float* totals) {
  const int64_t first = lesser(up_to_byte(low), high), bytes = (high - first) / 8;
  add_bits(packed, scale, low, first, totals);
  add_bytes(packed + first / 8, scale, bytes, totals + first - low);
  add_bits(packed, scale, first + 8 * bytes, high, totals + first + 8 * bytes - low);
}

template <class Out>
static void write_mean(const float* totals, float chunks, bool add, int64_t n, Out* out) {
  if (add) {
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) put(out[k], to_f32(out[k]) + totals[k] / chunks);
  } else {
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) put(out[k], totals[k] / chunks);
  }
}

template <class Out>
static void unpack(
    const uint8_t* packed, const float* scales, int64_t chunks, Cuts cuts, Out* out, int64_t numel, bool add) {
  const int64_t row_bytes = up_to_byte(numel) / 8;
  auto body = [=](int64_t low, int64_t high) {
    each_cut(cuts, low, high, [=](int64_t piece, int64_t a, int64_t b) {
      const int64_t rows = piece < cuts.count ? chunks : 0;  // padding is not in the sum
      for (int64_t start = a; start < b; start += RUN) {
        const int64_t end = lesser(start + RUN, b);
        float totals[RUN] = {};
        for (int64_t row = 0; row < rows; ++row) {
          add_signs(packed + row * row_bytes, scales[row * cuts.count + piece], start, end, totals);
        }
        write_mean(totals, float(chunks), add, end - start, out + start);
      }
    });
  };
  parallel_for(numel, GRAIN, body);
}

void sign_unpack_mean(
    const uint8_t* packed, const float* scales, int64_t chunks, Cuts cuts, void* out, Type type, int64_t numel,
    bool add, Stream) {
  if (type == Type::bf16) return unpack(packed, scales, chunks, cuts, static_cast<bf16*>(out), numel, add);
  if (type == Type::f16) return unpack(packed, scales, chunks, cuts, static_cast<f16*>(out), numel, add);
  unpack(packed, scales, chunks, cuts, static_cast<float*>(out), numel, add);
}

}  // namespace zf::cpu::ZF_ISA
