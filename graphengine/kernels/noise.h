// Counter-based noise, as sampling/noise.py defines it: Philox 4x32-10 keyed by a request's seed, over
// (vocabulary index / 4, position, stream, choice). No state.
#pragma once
#include <cmath>
#include <cstdint>

#include "vec.h"

enum Stream : uint32_t {
  kTargetStream = 0,
  kDraftStream = 1u << 30,
  kAcceptanceStream = 2u << 30,
  kResidualStream = 3u << 30,
};

struct Noise {
  uint32_t k0, k1;                    // the seed's low and high word
  uint32_t position, stream, choice;  // of the token that is drawn

  // The random words of vocabulary indices 4 * block .. 4 * block + 3.
  ALWAYS_INLINE void words(uint32_t block, uint32_t out[4]) const {
    uint32_t c0 = block, c1 = position, c2 = stream, c3 = choice, a = k0, b = k1;
    for (int round = 0; round < 10; round++) {
      uint64_t first = uint64_t{0xD2511F53} * c0, second = uint64_t{0xCD9E8D57} * c2;
      c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ a;
      c1 = static_cast<uint32_t>(second);
      c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ b;
      c3 = static_cast<uint32_t>(first);
      a += 0x9E3779B9;
      b += 0xBB67AE85;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
  }

  // The random words of vocabulary indices 64 * group .. 64 * group + 63.
  void words64(uint32_t group, uint32_t out[64]) const {
    uint32_t c0[16], c1[16], c2[16], c3[16], a = k0, b = k1;
    for (uint32_t i = 0; i < 16; i++) {
      c0[i] = group * 16 + i;
      c1[i] = position;
      c2[i] = stream;
      c3[i] = choice;
    }
    for (int round = 0; round < 10; round++) {
      for (int i = 0; i < 16; i++) {
        uint64_t first = uint64_t{0xD2511F53} * c0[i], second = uint64_t{0xCD9E8D57} * c2[i];
        c0[i] = static_cast<uint32_t>(second >> 32) ^ c1[i] ^ a;
        c1[i] = static_cast<uint32_t>(second);
        c2[i] = static_cast<uint32_t>(first >> 32) ^ c3[i] ^ b;
        c3[i] = static_cast<uint32_t>(first);
      }
      a += 0x9E3779B9;
      b += 0xBB67AE85;
    }
    for (int i = 0; i < 16; i++) {
      out[4 * i] = c0[i];
      out[4 * i + 1] = c1[i];
      out[4 * i + 2] = c2[i];
      out[4 * i + 3] = c3[i];
    }
  }

  ALWAYS_INLINE double uniform(int64_t index) const {
    uint32_t four[4];
    words(static_cast<uint32_t>(index / 4), four);
    return to_uniform(four[index % 4]);
  }

  static ALWAYS_INLINE double to_uniform(uint32_t word) { return (word + 0.5) * 0x1p-32; }
  static ALWAYS_INLINE double to_gumbel(uint32_t word) {
    return -std::log(-std::log1p(-to_uniform(word)));
  }
};

// No Gumbel number is larger: that of the smallest uniform, 2^-33.
constexpr double kLargestGumbel = 22.88;
