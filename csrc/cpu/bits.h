// Flags of eight elements as the bits of one byte.
#pragma once

#include "isa.h"

namespace zf::cpu::ZF_ISA {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "eight flags are moved as one number");

// Eight bytes of 0 or 1 become the bits of one: the multiplication moves byte k to bit 56 + k.
static inline uint8_t gather_bits(const uint8_t* flags) {
  uint64_t all;
  memcpy(&all, flags, sizeof all);
  return uint8_t(all * 0x0102040810204080u >> 56);
}

}  // namespace zf::cpu::ZF_ISA
