// Sources for the quantizer (tile/source.cuh) that compute SwiGLU's results while they load h.
#pragma once

#include "moxie/core/swiglu/weights.cuh"
#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {

// Loads h [R, 2F] and gives fragments of a [R, F].
template <class Glu, bool kIsAligned, Weighting kWeighting>
struct SwigluSource : OneTile {
  using T = ElementOf<Glu>;
  using Element = T;
  using Shared = std::conditional_t<kWeighting == Weighting::kByRow, TileWeights, Nothing>;
  static constexpr bool kAligned = kIsAligned;
  static constexpr int kCtas = 2;
  static constexpr int64_t kLongestRun = 2;
  static constexpr bool kStaged = kAligned && sizeof(T) == 2;
  const T* h;
  int64_t width;  // F
  WeightParams of;
  const Shared* shared;

  __device__ SwigluSource at_rows(const Panels&, const RowTile& at, Shared& own) const {
    SwigluSource source = *this;
    source.h += at.panel.begin * 2 * width;
    if constexpr (kWeighting == Weighting::kByRow) {
      own.load(of, at);
      source.shared = &own;
    }
    return source;
  }
  // Row i of the fragment.
  __device__ void multiply(int i, const RowWords<T>& gate, const RowWords<T>& up,
                           RowWords<T>& a) const {
    if constexpr (kWeighting == Weighting::kByRow)
      swiglu_row<Glu>(gate, up, shared->weight[fragment_row() + i], a);
    else
      swiglu_row<Glu>(gate, up, a);
  }
  __device__ const T* first(const TileSpan& span) const {
    return h + (span.row + fragment_row()) * 2 * width + span.col + fragment_col();
  }
  __device__ void load(const TileSpan& span, Fragment<T> (&fragments)[kParts]) const {
    const T* from = first(span);
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += 2 * width) {
      const int count = fragment_row() + i < span.rows ? span.cols - fragment_col() : 0;
      RowWords<T> gate, up;
      load_row<kAligned>(from, count, gate);
      load_row<kAligned>(from + width, count, up);
      multiply(i, gate, up, fragments[0].word[i]);
    }
  }

  using Stage = uint4[2][kFragment][kThreads];  // gate and up
  __device__ void stage(const TileSpan& span, Stage& stage) const {
    const T* from = first(span);
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += 2 * width) {
      const bool inside = fragment_row() + i < span.rows && fragment_col() < span.cols;
      stage_piece(stage[0][i], from, inside);
      stage_piece(stage[1][i], from + width, inside);
    }
    __pipeline_commit();
  }
  __device__ void unstage(const TileSpan&, const Stage& stage, const Held&,
                          Fragment<T> (&fragments)[kParts]) const {
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      RowWords<T> gate, up;
      staged_piece(stage[0][i], gate), staged_piece(stage[1][i], up);
      multiply(i, gate, up, fragments[0].word[i]);
    }
  }
};

// Loads da [R, F] and h [R, 2F] and gives fragments of dh [R, 2F]. The gradients of gate and up
// come from the same elements, so a load brings a tile of each. F must be a multiple of the tile's
// columns. With weights, it also stores the sums over each tile that make up their gradient
// (tile_sums).
template <Activation kActivation, Weighting kWeighting>
struct SwigluBackwardSource {
  using Glu = GluOf<bf16, kActivation>;
  static constexpr bool kWeighted = kWeighting == Weighting::kByRow;
  using Element = bf16;
  using Shared = std::conditional_t<kWeighted, TileWeights, Nothing>;
  static constexpr int kParts = 2;
  static constexpr bool kAligned = true;
  static constexpr bool kStaged = true;
  static constexpr bool kLarge = true;  // 107 KB: two CTAs fill an SM of Hopper
  static constexpr int kCtas = 2;
  static constexpr int64_t kLongestRun = 2;
  const bf16 *da, *h;
  int64_t width;  // F
  WeightParams of = {};
  float* tile_sums = nullptr;  // [R, F / 128]
  const Shared* shared = nullptr;

  __device__ int64_t part_cols() const { return width; }
  __device__ SwigluBackwardSource at_rows(const Panels&, const RowTile& at, Shared& own) const {
    SwigluBackwardSource source = *this;
    source.da += at.panel.begin * width;
    source.h += at.panel.begin * 2 * width;
    if constexpr (kWeighted) {
      own.load(of, at);
      source.shared = &own;
      source.tile_sums += at.panel.begin * (width / kTileCols);
    }
    return source;
  }
  // Computes row i of the fragments; the row's piece of its weight's gradient goes to piece[i].
  __device__ void multiply(int i, const RowWords<bf16>& d, const RowWords<bf16>& gate,
                           const RowWords<bf16>& up, Fragment<bf16> (&fragments)[kParts],
                           float (&piece)[kFragment]) const {
    if constexpr (kWeighted) {
      piece[i] = dot_piece<Glu>(d, gate, up);
      swiglu_backward_row<Glu>(d, gate, up, shared->weight[fragment_row() + i],
                               fragments[0].word[i], fragments[1].word[i]);
    } else {
      swiglu_backward_row<Glu>(d, gate, up, fragments[0].word[i], fragments[1].word[i]);
    }
  }
  __device__ void store_sums(const TileSpan& span, const float (&piece)[kFragment]) const {
    if constexpr (kWeighted) {
      const float sum = sum_pieces(piece);
      const int row = fragment_row() + row_of_sum();
      if (lane_index() % 2 == 0 && row < span.rows)
        tile_sums[(span.row + row) * (width / kTileCols) + span.col / kTileCols] = sum;
    }
  }
  __device__ int64_t first(const TileSpan& span) const { return span.row + fragment_row(); }
  __device__ int64_t col(const TileSpan& span) const { return span.col + fragment_col(); }

  __device__ void load(const TileSpan& span, Fragment<bf16> (&fragments)[kParts]) const {
    const bf16* from = h + first(span) * 2 * width + col(span);
    const bf16* grad = da + first(span) * width + col(span);
    float piece[kFragment];
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += 2 * width, grad += width) {
      const int count = fragment_row() + i < span.rows ? kFragment : 0;
      RowWords<bf16> d, gate, up;
      load_row<true>(grad, count, d);
      load_row<true>(from, count, gate);
      load_row<true>(from + width, count, up);
      multiply(i, d, gate, up, fragments, piece);
    }
    store_sums(span, piece);
  }

  // Two CTAs fill shared memory with gate, up and kStagedGrads of the eight rows of da. The other
  // rows of the next tile's da go to the registers of dgate, which are free while dup is quantized.
  // With all of da in registers some were spilled, which is a sixth more work for the L2 cache.
  static constexpr int kStagedGrads = 6;
  using Held = RowWords<bf16>[kFragment - kStagedGrads];
  using Stage = uint4[2 * kFragment + kStagedGrads][kThreads];
  __device__ void hold(const TileSpan& span, Held& held) const {
    const bf16* grad = da + (first(span) + kStagedGrads) * width + col(span);
#pragma unroll
    for (int i = kStagedGrads; i < kFragment; ++i, grad += width)
      load_row<true>(grad, fragment_row() + i < span.rows ? kFragment : 0, held[i - kStagedGrads]);
  }
  __device__ void stage(const TileSpan& span, Stage& stage) const {
    const bf16* from = h + first(span) * 2 * width + col(span);
    const bf16* grad = da + first(span) * width + col(span);
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += 2 * width, grad += width) {
      const bool inside = fragment_row() + i < span.rows;
      stage_piece(stage[2 * i], from, inside);
      stage_piece(stage[2 * i + 1], from + width, inside);
      if (i < kStagedGrads) stage_piece(stage[2 * kFragment + i], grad, inside);
    }
    __pipeline_commit();
  }
  __device__ void unstage(const TileSpan& span, const Stage& stage, const Held& held,
                          Fragment<bf16> (&fragments)[kParts]) const {
    __pipeline_wait_prior(0);
    float piece[kFragment];
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      RowWords<bf16> d, gate, up;
      staged_piece(stage[2 * i], gate), staged_piece(stage[2 * i + 1], up);
      if (i < kStagedGrads) {
        staged_piece(stage[2 * kFragment + i], d);
      } else {
#pragma unroll
        for (int k = 0; k < kFragment / 2; ++k) d[k] = held[i - kStagedGrads][k];
      }
      multiply(i, d, gate, up, fragments, piece);
    }
    store_sums(span, piece);
  }
};

// Gives fragments of dh like SwigluBackwardSource, but for any F and format, element by element.
template <class Glu>
struct SwigluBackwardElements : OneTile {
  using T = ElementOf<Glu>;
  using Element = T;
  static constexpr bool kAligned = false;
  static constexpr bool kStaged = false;
  static constexpr int kCtas = 2;
  static constexpr int64_t kLongestRun = 2;
  const T *da, *h;
  int64_t width;  // F
  WeightParams of;
  int64_t begin;  // the panel's first row

  __device__ SwigluBackwardElements at_rows(const Panels&, const RowTile& at, Shared&) const {
    SwigluBackwardElements source = *this;
    source.da += at.panel.begin * width;
    source.h += at.panel.begin * 2 * width;
    source.begin = at.panel.begin;
    return source;
  }
  __device__ static float value(const T* from) {
    if constexpr (sizeof(T) == 4)
      return *from;
    else
      return to_float(*from);
  }
  __device__ void load(const TileSpan& span, Fragment<T> (&fragments)[kParts]) const {
#pragma unroll 1
    for (int i = 0; i < kFragment; ++i) {
      const int64_t row = span.row + fragment_row() + i;
      float x[kFragment] = {};
#pragma unroll
      for (int j = 0; j < kFragment; ++j) {
        if (fragment_row() + i >= span.rows || fragment_col() + j >= span.cols) continue;
        const int64_t col = span.col + fragment_col() + j, f = col < width ? col : col - width;
        const T* gate = h + row * 2 * width + f;
        const SwigluGrads grads =
            swiglu_grads<Glu>(value(da + row * width + f), value(gate), value(gate + width));
        x[j] = col < width ? grads.gate : grads.up;
        if (of.weights) x[j] = __fmul_rn(of.weight(begin + row), x[j]);
      }
#pragma unroll
      for (int k = 0; k < kFragment; ++k)  // registers have no run-time index
        if (k == i) to_words(x, fragments[0].word[k]);
    }
  }
};

}  // namespace moxie::cuda
