// The checksum of packed weights on disk (docs/packed_formats.md): 64-bit multiply, xor and rotate in eight lanes.
//
// Every step is a bijection of its word, so a change inside one word always shows. Each word also goes to the lane
// beside its own, halves exchanged: a multiply alone passes its top bit on as one bit, which the next word of the lane
// could take back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pe {

constexpr size_t kChecksumBlock = size_t{1} << 20;

constexpr uint64_t checksum_mix(uint64_t h, uint64_t x) {
  h = (h ^ x) * 0x9E3779B97F4A7C15u;
  return h << 29 | h >> 35;
}

// Of one block of at most kChecksumBlock bytes, a multiple of 64.
uint64_t checksum_block(const uint8_t* data, size_t bytes);

// Of any multiple of 64 bytes: the blocks' checksums, mixed in order.
uint64_t checksum(const uint8_t* data, size_t bytes);

}  // namespace pe
