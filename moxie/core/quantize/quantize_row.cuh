// Quantizes a row by one warp, for ops that store it in several places: with blocks along the row,
// neighbouring lanes have the elements of a block, and a shuffle finds its amax.
#pragma once

#include <bit>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e8m0.cuh"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/ptx/e4m3_convert.cuh"
#include "moxie/core/ptx/magnitude.cuh"

namespace moxie::cuda {

constexpr int kRowPiece = 8;             // elements of a lane
constexpr int kMostRowScales = 1 << 10;  // of a row: 8 KB of shared memory for a CTA

struct RowScales {
  alignas(16) std::byte code[kWarps][kMostRowScales];
};

struct RowQuantizer {
  int64_t dim;
  int block;
  ScaleChoice choice;

  __device__ static void load(const float* from, float (&x)[kRowPiece]) {
#pragma unroll
    for (int i = 0; i < kRowPiece; i += 4)
      *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + i);
  }
  __device__ static void load(const bf16* from, float (&x)[kRowPiece]) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kRowPiece; i += 2) {
      x[i] = std::bit_cast<float>(pairs[i / 2] << 16);
      x[i + 1] = std::bit_cast<float>(pairs[i / 2] & 0xffff0000u);
    }
  }

  // The code of the block that these elements belong to.
  __device__ uint32_t block_code(const float (&x)[kRowPiece]) const {
    uint32_t amax = 0;
#pragma unroll
    for (const float value : x) amax = ptx::max_magnitude(amax, std::bit_cast<uint32_t>(value));
    for (int step = 1; step < block / kRowPiece; step *= 2)
      amax = ptx::max_magnitude(amax, __shfl_xor_sync(~0u, amax, step));
    return code_of(amax & 0x7fffffffu, choice);
  }

  // Calls store(column, eight elements), and writes the codes to shared memory.
  template <class T, class Store>
  __device__ void quantize(const T* row, std::byte* codes, Store&& store) const {
    for (int64_t first = 0; first < dim; first += kWarp * kRowPiece) {
      const int64_t col = first + lane_index() * kRowPiece;
      alignas(sizeof(float4)) float x[kRowPiece] = {};
      if (col < dim) load(row + col, x);
      const uint32_t code = block_code(x);
      const float inverse = inverse_of(code);
#pragma unroll
      for (float& value : x) value *= inverse;
      if (col >= dim) continue;  // the last turn: no lane waits for another any more
      store(col, uint2{ptx::encode4(x), ptx::encode4(x + 4)});
      if (col % block == 0) codes[col / block] = static_cast<std::byte>(code);
    }
    __syncwarp();
  }
};

inline RowQuantizer row_quantizer(int64_t dim, Block block, ScaleRule rule) {
  return {.dim = dim, .block = block.cols, .choice = choice_of(rule)};
}

// Whether rows are whole pieces, elements are aligned to them, and blocks lie along rows.
inline bool fits_row_quantizer(const ConstFloatView& x, const QuantizedOut& out) {
  const uint64_t addresses =
      std::bit_cast<uint64_t>(x.data) | std::bit_cast<uint64_t>(out.qdata.data);
  return x.dim(1) % (2 * kRowPiece) == 0 && addresses % sizeof(uint4) == 0 && out.block.rows == 1 &&
         ceil_div<int64_t>(x.dim(1), out.block.cols) <= kMostRowScales;
}

}  // namespace moxie::cuda
