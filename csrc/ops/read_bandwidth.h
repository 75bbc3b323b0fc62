// The machine's read bandwidth, measured the way the kernels use memory: every lane of the pool streams
// its share once.
#pragma once

#include <cstdint>

#include "core/pool.h"

namespace ft {

// The sum, modulo 2^64, of the native-endian 64-bit words of [data, data + bytes), a last partial word
// padded with zero bytes. It depends on every byte, so that no read can be left out.
std::uint64_t read_bytes(ThreadPool& pool, const std::uint8_t* data, std::int64_t bytes);

}  // namespace ft
