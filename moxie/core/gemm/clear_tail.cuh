// Zeroes the padding of a group's last block in shared memory. Includes no CUDA headers, so that a
// test runs it on a CPU.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// Zeroes the bytes from `live` on in each of `count` rows of kTileK bytes. Called by `warps` warps,
// of which this is number `warp`; each lane takes every (warps * 32)-th row. TMA has written the
// rows with its 128-byte swizzle: the c-th 16 bytes of row r are at place c ^ (r % 8).
__device__ inline void clear_tail(uint8_t* rows, int count, int live, int warp, int warps) {
  constexpr int kPiece = 16;
  for (int r = warp * cuda::kWarp + cuda::lane_index(); r < count; r += warps * cuda::kWarp)
    for (int c = live / kPiece; c < kTileK / kPiece; ++c) {
      uint8_t* const piece = rows + r * kTileK + (c ^ (r % 8)) * kPiece;
      const int kept = live - c * kPiece;
      if (kept <= 0) {
        reinterpret_cast<uint64_t*>(piece)[0] = 0;
        reinterpret_cast<uint64_t*>(piece)[1] = 0;
      } else {
        for (int i = kept; i < kPiece; ++i) piece[i] = 0;
      }
    }
}

}  // namespace moxie::sm90
