// The routing weights of rows in SwiGLU's kernels, and the sums that make up their gradient, in the
// order of row_weights.h.
#pragma once

#include "moxie/core/swiglu/row_weights.h"
#include "moxie/core/swiglu/swiglu.cuh"

namespace moxie::cuda {

enum class Weighting { kNone, kByRow };

// The routing weights of rows; both pointers are null if rows have none.
struct WeightParams {
  const float* weights;    // by slot
  const int32_t* slot_of;  // of each row
  int64_t rows;

  // Clamps a slot to [0, rows), because it comes from the caller, who may be wrong.
  __device__ int64_t slot(int64_t row) const {
    return min<int64_t>(max<int64_t>(slot_of[row], 0), rows - 1);
  }
  __device__ float weight(int64_t row) const { return weights[slot(row)]; }
};

inline WeightParams weight_params(const RowWeights& of) {
  return {of.weights.data, of.slot_of.data, of.slot_of.dim(0)};
}
inline WeightParams weight_params(const std::optional<RowWeights>& of) {
  return of ? weight_params(*of) : WeightParams{};
}
inline WeightParams weight_params(const std::optional<WeightGradient>& of) {
  return of ? weight_params(of->of) : WeightParams{};
}

// The weights of a tile's rows, in shared memory.
struct TileWeights {
  float weight[kTileRows];

  // All threads of the CTA must call it.
  __device__ void load(const WeightParams& from, const RowTile& at) {
    if (const int row = threadIdx.x; row < kTileRows) {
      const int64_t r = at.panel.begin + at.row + row;
      weight[row] = at.row + row < at.panel.rows ? from.weight(r) : 0.f;
    }
    __syncthreads();
  }
};

template <class Glu, class T = ElementOf<Glu>>
__device__ float dot_piece(const RowWords<T>& da, const RowWords<T>& gate, const RowWords<T>& up) {
  float d[kFragment], g[kFragment], u[kFragment];
  to_floats(da, d), to_floats(gate, g), to_floats(up, u);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kFragment; ++j)
    sum = __fadd_rn(sum, __fmul_rn(d[j], swiglu_of<Glu>(g[j], u[j])));
  return sum;
}
static_assert(kDotPiece == kFragment && kDotPieces == kFragmentLanes && kDotTile == kTileCols);

// Adds up each row's pieces over the 16 lanes that hold them; piece[i] is this lane's piece of row
// i of its fragment. Every exchange halves the rows that a lane goes on with: lane l of the 16
// returns the sum of row l / 2.
__device__ inline float sum_pieces(const float (&piece)[kFragment]) {
  const int lane = lane_index();
  const auto exchange = [&](float low, float high, int step) {
    const bool upper = lane & step;
    return __fadd_rn(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, step));
  };
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = exchange(piece[i], piece[i + 4], 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = exchange(four[i], four[i + 2], 4);
  const float one = exchange(two[0], two[1], 2);
  return __fadd_rn(one, __shfl_xor_sync(~0u, one, 1));
}
// The row of the fragment, of eight, whose sum sum_pieces() returns to this lane.
__device__ inline int row_of_sum() { return lane_index() % kFragmentLanes / 2; }

}  // namespace moxie::cuda
