// The padding of a group's last block, made zero in shared memory. Needs no header of the toolkit:
// a test runs it on a CPU.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

// Zeros in the bytes from `live` on of rows of kTileK bytes. One of `warps` warps, of which this is
// `warp`, takes every warps * 32nd row. TMA wrote them with its swizzle of 128 bytes: of row
// r, the 16 bytes that would be in place c are in place c ^ (r % 8).
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
