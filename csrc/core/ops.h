// What a kernel is told: raw pointers and numbers. `bind.h` has checked them already (types, sizes, one device),
// so that kernels need not. Pointers may start at any element, sizes may be 0. `functions.h` says what is done.
#pragma once

#include "types.h"

namespace zf {

using Stream = void*;  // a cudaStream_t

// One tensor of an optimizer's work.
struct Slot {
  void* master;
  const void* grad;  // null where an operator needs none
  void* exp_avg;
  void* exp_avg_sq;
  void* copy;         // null: nobody wants it
  const float* step;  // the number of this step, from 1
  int64_t numel;
};

// The same with the bits of its copy's changed elements.
struct MarkedSlot {
  Slot slot;
  uint8_t* changed;
  int64_t numel;  // of the slot, rounded up to whole bytes of `changed`
};

// The same with what its stochastic rounding depends on.
struct StochasticSlot : Slot {
  uint64_t key;    // of the parameter
  uint64_t place;  // of the first element, in the parameter
};

struct SlotTypes {
  Type master, grad, moments, copy;  // `none` where the pointers are null
};

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double factor;   // gradients count times this
  bool decoupled;  // AdamW's decay, else L2
  bool bias_correction;
};

struct LambOptions {
  double lr, beta1, beta2, eps, weight_decay, factor, min_trust, max_trust;
  bool bias_correction, eps_inside_sqrt;
};

struct Piece {
  void* data;
  int64_t numel;
};

// What is added up: arrays of one type and size.
struct Terms {
  void* const* data;
  int64_t count;
  Type type;
};

// Rows of numbers, each with its payload or several. Row (i, j) begins i * [0] + j * [1] elements, or bytes of
// payloads, behind the first.
struct BlockRows {
  int64_t counts[2];  // of i and of j
  int64_t numel;      // of a row
  int64_t numbers[2], payloads[2];
  int64_t terms, apart;  // how many payloads a row has, and how many bytes they are apart
};

// A flat tensor is cut into pieces that end at `ends`; what lies behind the last is padding.
struct Cuts {
  const int64_t* ends;
  int64_t count;
};

}  // namespace zf
