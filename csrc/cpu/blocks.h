// Blocks of an array of any type as fp32, small enough to stay in the nearest cache.
#pragma once

#include "isa.h"

namespace zf::cpu::ZF_ISA {

static const int64_t BLOCK = 256;  // elements

template <class T>
static void widen(const T* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_f32(from[i]);
}

template <class T>
static void narrow(const float* __restrict from, T* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(to[i], from[i]);
}

static inline void write(void* array, Type type, int64_t at, int64_t count, const float* from) {
  if (type == Type::bf16) narrow(from, static_cast<bf16*>(array) + at, count);
  if (type == Type::f16) narrow(from, static_cast<f16*>(array) + at, count);
}

template <class Body>
static void for_blocks(int64_t low, int64_t high, const Body& body) {
  for (int64_t at = low; at < high; at += BLOCK) body(at, at + BLOCK < high ? BLOCK : high - at);
}

// A window on an array. What is fp32 already is not copied.
struct Block {
  void* array;
  Type type;
  alignas(64) float room[BLOCK];

  Block(void* array, Type type) : array(array), type(type) {}

  float* read(int64_t at, int64_t count) {
    if (type == Type::f32) return static_cast<float*>(array) + at;
    if (type == Type::bf16) widen(static_cast<const bf16*>(array) + at, room, count);
    if (type == Type::f16) widen(static_cast<const f16*>(array) + at, room, count);
    return room;
  }

  void write_back(int64_t at, int64_t count) { write(array, type, at, count, room); }
};

}  // namespace zf::cpu::ZF_ISA
