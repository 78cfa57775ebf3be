// The weighted sum of each token's rows, read where the ranks of its experts left them.
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/meet.cuh"
#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {
namespace {

// Eight elements as packed words.
template <class T>
using Chunk = uint32_t[kFragment * sizeof(T) / 4];

// Loads in flight per lane: 128 bytes, as unpermute.
template <class T>
constexpr int kInFlight = 16 / static_cast<int>(sizeof(T));

template <class T>
struct CombineParams {
  Peers peers;
  const T* own_rows;
  const int32_t *expert, *row;  // by slot
  const float* weights;         // may be nullptr
  T* x;
  int64_t tokens, top_k, dim, limit;

  __device__ const T* row_of(int64_t slot) const {
    const int rank = expert[slot] / peers.local_experts;
    const T* const rows = rank == peers.rank ? own_rows : peers.region<T>(rank, peers.at.rows);
    return rows + min<int64_t>(max<int32_t>(row[slot], 0), limit - 1) * dim;
  }
};

// One warp per token. It reads kSlots rows at a time, kInFlight chunks in all; sums run over slots
// in order.
template <class T, bool kAligned, int kSlots>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ CombineParams<T> p) {
  constexpr int kColumns = kInFlight<T> / kSlots;
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens) return;
  const int64_t first_slot = token * p.top_k;
  const bool failed = p.peers.has_failed();
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
        const T* row = p.row_of(slot);
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
          // No FMA: products are rounded, as on a CPU. A weight of 1 changes nothing.
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

struct ValuesParams {
  Peers peers;
  const float* own;
  const int32_t *expert, *row;
  float* of_slots;
  int64_t slots, limit;
};

__global__ __launch_bounds__(kThreads) void values_kernel(const __grid_constant__ ValuesParams p) {
  const int64_t slot = work_index() * kThreads + threadIdx.x;
  if (slot >= p.slots) return;
  const int rank = p.expert[slot] / p.peers.local_experts;
  const float* const values =
      rank == p.peers.rank ? p.own : p.peers.region<float>(rank, p.peers.at.row_gradient);
  p.of_slots[slot] = p.peers.has_failed()
                         ? __int_as_float(0x7fffffff)
                         : values[min<int64_t>(max<int32_t>(p.row[slot], 0), p.limit - 1)];
}

template <class T>
void combine_rows(const CombineArgs& args, void* stream) {
  const int64_t tokens = args.x.dim(0), slots = args.slots.dim(1);
  if (tokens == 0) return;
  const CombineParams<T> params{.peers = peers_of(args.memory),
                                .own_rows = static_cast<const T*>(args.rows->data),
                                .expert = args.slots.data,
                                .row = args.slots.data + slots,
                                .weights = args.weights ? args.weights->data : nullptr,
                                .x = static_cast<T*>(args.x.data),
                                .tokens = tokens,
                                .top_k = slots / tokens,
                                .dim = args.x.dim(1),
                                .limit = args.limits.rows};
  // Regions of the shared memory are aligned.
  const bool aligned = are_rows_aligned(params.own_rows, params.dim, kFragment) &&
                       are_rows_aligned(params.x, params.dim, kFragment);
  const auto start = [&](auto kernel) {
    launch({"combine", stream, ceil_div<int64_t>(tokens, kWarps)}, kernel, params);
  };
  if (!aligned)
    start(combine_kernel<T, false, 2>);
  else if (params.top_k <= 2)
    start(combine_kernel<T, true, 2>);
  else
    start(combine_kernel<T, true, 4>);
}

}  // namespace

void combine(const CombineArgs& args, void* stream) {
  if (args.rows) with_format(args.rows->format, [&]<class T>() { combine_rows<T>(args, stream); });
  const int64_t slots = args.slots.dim(1);
  if (args.of_pairs)
    launch({"combine", stream, ceil_div<int64_t>(slots, kThreads)}, values_kernel,
           ValuesParams{.peers = peers_of(args.memory),
                        .own = args.of_pairs->data,
                        .expert = args.slots.data,
                        .row = args.slots.data + slots,
                        .of_slots = args.of_slots.data,
                        .slots = slots,
                        .limit = args.limits.rows});
}

}  // namespace moxie::cuda
