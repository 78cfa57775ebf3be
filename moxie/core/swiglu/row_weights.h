// The routing weights of rows, which scale SwiGLU's result and its gradient.
#pragma once

#include "moxie/core/base/view.h"

namespace moxie {

// Row r is a token's copy for slot slot_of[r] (route.h), so its weight is weights[slot_of[r]].
struct RowWeights {
  View<const float> weights;    // [R], by slot
  View<const int32_t> slot_of;  // [R], 0 to R - 1
};

// The gradient of the weights of rows: dweights[slot_of[r]] = sum over f of da[r, f] * a[r, f].
//
// It is computed in f32, with every product and sum rounded, in the same order on all backends.
// Eight neighbouring columns are added from the first to the last; 16 such pieces are a tile of 128
// columns, in which piece i is added to piece i + 8, then i + 4, i + 2 and i + 1; tiles are added
// from the first on.
struct WeightGradient {
  RowWeights of;
  View<float> dweights;   // result, [R], by slot
  View<float> workspace;  // cuda: [R, weight_gradient_tiles(F)]; may be empty elsewhere
};

inline constexpr int kDotPiece = 8, kDotPieces = 16, kDotTile = kDotPiece * kDotPieces;

template <class Int>
Int weight_gradient_tiles(const Int& width) {
  return (width + Int(kDotTile - 1)) / Int(kDotTile);
}

// Adds up the 128 terms of a tile in the order that WeightGradient defines: eight neighbours, then
// pieces in pairs.
inline float sum_dot_tile(const float (&terms)[kDotTile]) {
  float piece[kDotPieces];
  for (int i = 0; i < kDotPieces; ++i) {
    piece[i] = 0;
    for (int j = 0; j < kDotPiece; ++j) piece[i] += terms[i * kDotPiece + j];
  }
  for (int step = kDotPieces / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) piece[i] += piece[i + step];
  return piece[0];
}

}  // namespace moxie
