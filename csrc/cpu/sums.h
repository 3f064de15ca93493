// Sums whose bits depend neither on the number of threads nor on the instruction set: what is added up are
// stretches that the sizes alone decide, each in a fixed number of lanes.
#pragma once

#include "isa.h"

namespace zf::cpu::ZF_ISA {

static const int LANES = 16;  // sums that do not wait for each other, vectors for the compiler

static inline double in_total(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  return sum;
}

// Some elements of a part (a piece, a slot). All parts are counted through, and cut at their ends and at the
// multiples of a grain: small parts share a thread's work, large ones are divided.
struct Stretch {
  int64_t part, low, high;
  int64_t before;  // elements of the parts before
  int64_t place;   // a number for its sum that no other stretch has: grain + part, one of which grows at each cut
};

// `body(stretch)` for what lies in [low, high), in order.
template <class Part, class Body>
static void each_stretch(const Part* parts, int64_t grain, int64_t low, int64_t high, const Body& body) {
  int64_t start = 0;
  for (int64_t part = 0; start < high; ++part) {
    const int64_t end = start + parts[part].numel, stop = end < high ? end : high;
    for (int64_t at = start > low ? start : low, next; at < stop; at = next) {
      next = (at / grain + 1) * grain < stop ? (at / grain + 1) * grain : stop;
      body(Stretch{part, at - start, next - start, start, at / grain + part});
    }
    start = end;
  }
}

template <class Part>
static int64_t all_elements(const Part* parts, int64_t count) {
  int64_t total = 0;
  for (int64_t part = 0; part < count; ++part) total += parts[part].numel;
  return total;
}

// More than any `place`.
template <class Part>
static int64_t places(const Part* parts, int64_t count, int64_t grain) {
  return all_elements(parts, count) / grain + 1 + count;
}

// `body(stretch)` for everything, on torch's threads.
template <class Part, class Body>
static void for_stretches(const Part* parts, int64_t count, int64_t grain, const Body& body) {
  auto range = [&](int64_t low, int64_t high) { each_stretch(parts, grain, low, high, body); };
  parallel_for(all_elements(parts, count), grain, range);
}

}  // namespace zf::cpu::ZF_ISA
