// The weighted sum of a token's rows, which unpermute and the exchange's combine compute alike.
#pragma once

#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {

// Eight elements as packed words.
template <class T>
using Chunk = uint32_t[kFragment * sizeof(T) / 4];

// Chunks that a lane loads before it uses the first: 128 bytes, enough to saturate memory with rows
// of any length.
template <class T>
constexpr int kInFlight = 16 / static_cast<int>(sizeof(T));

template <class T>
struct SumArgs {
  const float* weights;  // of the slots, [tokens * top_k]; may be nullptr
  T* x;                  // result, [tokens, dim]
  int64_t tokens, top_k, dim;
};

// Run by all warps of a grid, one per token. A warp reads kSlots rows at a time, kInFlight chunks
// in all; sums run over the slots in order. row_of(slot) is where the slot's row begins. If
// has_failed(), no row is read, and the results are NaN.
template <class T, bool kAligned, int kSlots, class Failed, class RowOf>
__device__ __forceinline__ void sum_rows(const SumArgs<T>& p, const Failed& has_failed,
                                         const RowOf& row_of) {
  constexpr int kColumns = kInFlight<T> / kSlots;
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens) return;
  const int64_t first_slot = token * p.top_k;
  const bool failed = has_failed();
#pragma unroll 1
  for (int64_t first = lane_index() * kFragment; first < p.dim;
       first += kWarp * kFragment * kColumns) {
    const auto at = [&](int c) { return first + c * kWarp * kFragment; };
    const auto left = [&](int c) { return clip(p.dim - at(c), kFragment); };
    float sum[kColumns][kFragment] = {};
#pragma unroll 1
    for (int64_t j = 0; j < p.top_k && !failed; j += kSlots) {
      Chunk<T> chunk[kSlots][kColumns];
      float weight[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const bool inside = j + s < p.top_k;
        const int64_t slot = first_slot + (inside ? j + s : 0);
        weight[s] = inside && p.weights ? p.weights[slot] : 1.f;
        const T* row = row_of(slot);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          load_row<kAligned>(row + at(c), inside ? left(c) : 0, chunk[s][c]);
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (j + s >= p.top_k) break;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float x[kFragment];
          to_floats(chunk[s][c], x);
          // No FMA: products are rounded before they are added, as on a CPU. A weight of 1 changes
          // nothing.
#pragma unroll
          for (int e = 0; e < kFragment; ++e)
            sum[c][e] = __fadd_rn(sum[c][e], __fmul_rn(weight[s], x[e]));
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (failed)
#pragma unroll
        for (float& value : sum[c]) value = __int_as_float(0x7fffffff);
      Chunk<T> chunk;
      to_words(sum[c], chunk);
      store_row<kAligned>(p.x + token * p.dim + at(c), left(c), chunk);
    }
  }
}

// Starts the instance of a kernel of sum_rows() that suits the rows, start<kAligned, kSlots>().
template <class Start>
void with_sum_instance(bool aligned, int64_t top_k, Start&& start) {
  if (!aligned)
    start.template operator()<false, 2>();
  else if (top_k <= 2)
    start.template operator()<true, 2>();
  else
    start.template operator()<true, 4>();
}

}  // namespace moxie::cuda
