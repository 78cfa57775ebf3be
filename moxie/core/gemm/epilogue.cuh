// The epilogue: stores sums from registers to global memory. bf16 goes through shared memory and
// TMA, 16 rows of a warp at a time, while the next tile is multiplied. f32, and pieces of 16 rows
// in which a group ends, are stored without TMA.
#pragma once

#include <cuda_bf16.h>

#include "moxie/core/gemm/mainloop.cuh"
#include "moxie/core/gemm/scale_codes.cuh"
#include "moxie/core/ptx/stmatrix.cuh"
#include "moxie/core/ptx/tma.cuh"

namespace moxie::sm90 {

// Rounds two floats to bf16. Unlike cuda::to_bf16_pair(), it does not canonicalize NaN.
__device__ __forceinline__ uint32_t to_bf16_pair_any_nan(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline float bias_at(const GemmParams& p, int64_t i) {
  return p.bias_format == Format::kF32
             ? __ldg(static_cast<const float*>(p.bias) + i)
             : __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(p.bias) + i));
}

template <class Tile, class Out>
class Epilogue {
 public:
  // A thread holds runs of kRun neighbouring columns; see b_map in gemm_kernel.cuh.
  static constexpr int kRun = sizeof(Out) == 2 ? 2 : 4;
  static constexpr int kFold = 4 * kRun;

  __device__ Epilogue(const GemmParams& p, GemmShared<Tile>& shared)
      : p_(p), boxes_(shared.out[uniform(cuda::warp_index())]) {}

  __device__ __forceinline__ void store(const Work& work, Product& sums) const {
    if (Tile::kRagged == Ragged::kDepth && p_.add && uniform(work.k_blocks) == 0) return;
    if (Tile::kRagged == Ragged::kRows && p_.bias && uniform(work.group) < p_.groups)
      add_bias(work, sums);
    // TMA coordinates must be uniform, or the compiler makes each store a loop over the lanes.
    const int first_row =
        uniform(work.row + (Tile::kRagged == Ragged::kDepth ? work.group * p_.m : 0));
    const int col = uniform(work.col), warp_row = uniform(Rows::of_warp());
    const int rows = uniform(work.rows) - warp_row;
    if (rows <= 0) return;
    if (sizeof(Out) == 2 && rows >= StoreBox::kRows)
      store_box(first_row + warp_row, col, sums);
    else
      store_rows(first_row + warp_row, col, rows, sums);
  }

  // Call before the CTA exits: TMA may still be reading its shared memory.
  __device__ void finish() const {
    if (cuda::lane_index() == 0) ptx::bulk_wait_group_read<0>();
  }

 private:
  static __device__ int column(int chunk) { return chunk * kFold + cuda::lane_index() % 4 * kRun; }
  // Index in Product of column(chunk) + i, in the thread's first row (half 0) or its second (half
  // 1).
  static constexpr __device__ int index(int chunk, int half, int i) {
    return 4 * (chunk * kRun / 2 + i / 2) + 2 * half + i % 2;
  }

  __device__ void add_bias(const Work& work, Product& sums) const {
    const int64_t first = int64_t{work.group} * p_.bias_stride + work.col;
#pragma unroll
    for (int chunk = 0; chunk < kTileN / kFold; ++chunk) {
      if (work.col + column(chunk) >= p_.n) break;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const float bias = bias_at(p_, first + column(chunk) + i);
        sums[index(chunk, 0, i)] += bias;
        sums[index(chunk, 1, i)] += bias;
      }
    }
  }

  __device__ __forceinline__ void store_box(int row, int col, const Product& sums) const {
    const int lane = cuda::lane_index(), box_row = lane % 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreBox& box = boxes_[half % Tile::kBoxes];
      // Waits until TMA has read this box's previous content; stores of other boxes may be pending.
      if (lane == 0) ptx::bulk_wait_group_read<Tile::kBoxes - 1>();
      __syncwarp();
      // stmatrix stores 8 x 8 matrices, each of which is 16 bytes in 8 rows. TMA's 128-byte swizzle
      // expects these 16 bytes at their number in the row, xor the row.
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int place = (j + lane / 16) ^ box_row % 8;
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 32 * half + 4 * j + 2 * i;
          pairs[i] = to_bf16_pair_any_nan(sums[at], sums[at + 1]);
        }
        ptx::stmatrix_x4(box.bytes + box_row * StoreBox::kBytes + place * 16, pairs);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        const int byte = 2 * col + half * StoreBox::kBytes;
        ptx::tma_store_2d(&p_.out_map, box.bytes, byte, row);
        ptx::bulk_commit_group();
      }
    }
  }

  // Stores `rows` rows of this warp from registers, from first_row on.
  __device__ __forceinline__ void store_rows(int64_t first_row, int col, int rows,
                                             const Product& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = cuda::lane_index() / 4 + half * 8;
      if (row >= rows) continue;
      Out* out = static_cast<Out*>(p_.out) + (first_row + row) * p_.n + col;
#pragma unroll
      for (int chunk = 0; chunk < kTileN / kFold; ++chunk) {
        if (col + column(chunk) >= p_.n) break;
        const auto value = [&](int i) { return sums[index(chunk, half, i)]; };
        Out* to = out + column(chunk);
        if constexpr (sizeof(Out) == 2) {
          *reinterpret_cast<uint32_t*>(to) = to_bf16_pair_any_nan(value(0), value(1));
        } else {
          float4 word{value(0), value(1), value(2), value(3)};
          if (Tile::kRagged == Ragged::kDepth && p_.add) {
            const float4 old = *reinterpret_cast<const float4*>(to);
            word = {old.x + word.x, old.y + word.y, old.z + word.z, old.w + word.w};
          }
          *reinterpret_cast<float4*>(to) = word;
        }
      }
    }
  }

  const GemmParams& p_;
  StoreBox (&boxes_)[Tile::kBoxes];
};

}  // namespace moxie::sm90
