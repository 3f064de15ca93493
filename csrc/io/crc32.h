// The CRC-32 of zlib, by carry-less multiplication.
#pragma once

#include <cstdint>

namespace zf::io {

// Whether `crc32` works on this processor.
bool has_crc32();

// As zlib's crc32: of the bytes that `before` is of, followed by these.
uint32_t crc32(uint32_t before, const unsigned char* data, int64_t bytes);

}  // namespace zf::io
