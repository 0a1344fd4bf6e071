#include "core/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

static_assert(std::endian::native == std::endian::little);  // packed weights are little-endian, in memory and on disk

namespace pe {

uint64_t checksum_block(const uint8_t* data, size_t bytes) {
  constexpr int kLanes = 8;
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint64_t>(i) + 1;
  for (size_t at = 0; at < bytes; at += 64)
    for (int i = 0; i < kLanes; ++i) {
      uint64_t word, neighbour;
      std::memcpy(&word, data + at + 8 * i, 8);
      std::memcpy(&neighbour, data + at + 8 * (i ^ 1), 8);
      lanes[i] = checksum_mix(lanes[i], word) + (neighbour << 32 | neighbour >> 32);
    }
  uint64_t sum = bytes;
  for (int i = 0; i < kLanes; ++i) sum = checksum_mix(sum, lanes[i]);
  return sum;
}

uint64_t checksum(const uint8_t* data, size_t bytes) {
  uint64_t sum = bytes;
  for (size_t at = 0; at < bytes; at += kChecksumBlock)
    sum = checksum_mix(sum, checksum_block(data + at, std::min(kChecksumBlock, bytes - at)));
  return sum;
}

}  // namespace pe
