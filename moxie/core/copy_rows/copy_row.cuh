// A warp, or some of its lanes, move a row, as bytes, in the widest pieces that everything is
// aligned to.
#pragma once

#include "moxie/core/base/cuda.cuh"

namespace moxie::cuda {

// Copies `bytes` from `from` to `to[d] + offset`, for every d, by kLanes neighbouring lanes.
template <class Word, int kLanes>
__device__ void copy_words(const std::byte* from, std::byte* const* to, int count, int64_t offset,
                           int64_t bytes) {
  constexpr int64_t kStep = kLanes * sizeof(Word);
  // Loads in flight per lane: 64 bytes, so that a row of 2048 bytes is one round.
  constexpr int kInFlight = 4;
#pragma unroll 1
  for (int64_t first = lane_index() % kLanes * sizeof(Word); first < bytes;
       first += kInFlight * kStep) {
    Word word[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kStep < bytes)
        word[i] = *reinterpret_cast<const Word*>(from + first + i * kStep);
    for (int d = 0; d < count; ++d)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + i * kStep < bytes)
          *reinterpret_cast<Word*>(to[d] + offset + first + i * kStep) = word[i];
  }
}

// alignment: a number whose lowest bits are zero as far as every address and size is aligned.
template <int kLanes = kWarp>
__device__ void copy_row(const std::byte* from, std::byte* const* to, int count, int64_t offset,
                         int64_t bytes, uint64_t alignment) {
  if (alignment % sizeof(uint4) == 0)
    copy_words<uint4, kLanes>(from, to, count, offset, bytes);
  else if (alignment % sizeof(uint2) == 0)
    copy_words<uint2, kLanes>(from, to, count, offset, bytes);
  else if (alignment % sizeof(uint32_t) == 0)
    copy_words<uint32_t, kLanes>(from, to, count, offset, bytes);
  else
    copy_words<uint8_t, kLanes>(from, to, count, offset, bytes);
}

// In every format that travels, bytes of ones are NaN.
__device__ inline void fill_nan(std::byte* to, int64_t bytes) {
  for (int64_t i = lane_index(); i < bytes; i += kWarp) to[i] = std::byte{0xff};
}

inline uint64_t bits_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace moxie::cuda
