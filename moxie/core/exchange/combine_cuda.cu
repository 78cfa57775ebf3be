// The weighted sum of each token's rows, read where the ranks of its experts left them.
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/meet.cuh"
#include "moxie/core/permute/sum_rows.cuh"

namespace moxie::cuda {
namespace {

template <class T>
struct CombineParams {
  Peers peers;
  const T* own_rows;
  const int32_t *expert, *row;  // by slot
  SumArgs<T> sum;
  int64_t limit;

  __device__ const T* row_of(int64_t slot) const {
    const int rank = expert[slot] / peers.local_experts;
    const T* const rows = rank == peers.rank ? own_rows : peers.region<T>(rank, peers.at.rows);
    return rows + min<int64_t>(max<int32_t>(row[slot], 0), limit - 1) * sum.dim;
  }
};

// One warp per token.
template <class T, bool kAligned, int kSlots>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ CombineParams<T> p) {
  sum_rows<T, kAligned, kSlots>(
      p.sum, [&] { return p.peers.has_failed(); }, [&](int64_t slot) { return p.row_of(slot); });
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
                                .sum = {.weights = args.weights ? args.weights->data : nullptr,
                                        .x = static_cast<T*>(args.x.data),
                                        .tokens = tokens,
                                        .top_k = slots / tokens,
                                        .dim = args.x.dim(1)},
                                .limit = args.limits.rows};
  // Regions of the shared memory are aligned.
  const bool aligned = are_rows_aligned(params.own_rows, params.sum.dim, kFragment) &&
                       are_rows_aligned(params.sum.x, params.sum.dim, kFragment);
  with_sum_instance(aligned, params.sum.top_k, [&]<bool kAligned, int kSlots>() {
    launch({"combine", stream, ceil_div<int64_t>(tokens, kWarps)},
           combine_kernel<T, kAligned, kSlots>, params);
  });
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
