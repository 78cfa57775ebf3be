// b2 of the experts and the sums for its gradient: left in this rank's memory, and read in that of
// every rank. A warp per row.
#include "moxie/core/copy_rows/copy_row.cuh"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/meet.cuh"

namespace moxie::cuda {
namespace {

struct BiasParams {
  Peers peers;
  std::byte* matrix;  // [rows, bytes], to read or to write
  int64_t rows, bytes;
  int64_t region;     // of the shared memory, an offset
  int64_t first = 0;  // of the rows that a rank has left, the one to begin with
  uint64_t alignment;
};

__global__ __launch_bounds__(kThreads) void send_bias_kernel(const __grid_constant__ BiasParams p) {
  const int64_t r = work_index() * kWarps + warp_index();
  // Not after a failure: a peer may still read what backward left before.
  if (r >= p.rows || p.peers.has_failed()) return;
  std::byte* const to = p.peers.own<std::byte>(p.region) + r * p.peers.capacity.bias_bytes;
  copy_row(p.matrix + r * p.bytes, &to, 1, 0, p.bytes, p.alignment);
}

__global__ __launch_bounds__(kThreads) void receive_bias_kernel(
    const __grid_constant__ BiasParams p) {
  const int64_t r = work_index() * kWarps + warp_index();
  if (r >= p.rows) return;
  std::byte* const to = p.matrix + r * p.bytes;
  if (p.peers.has_failed()) return fill_nan(to, p.bytes);
  const int local = p.peers.local_experts;
  const std::byte* const left = p.peers.region<std::byte>(static_cast<int>(r / local), p.region);
  copy_row(left + (p.first + r % local) * p.peers.capacity.bias_bytes, &to, 1, 0, p.bytes,
           p.alignment);
}

// Regions of the shared memory are aligned.
template <class T>
BiasParams params_of(const SharedMemory& memory, const View<T>& matrix) {
  const int64_t bytes = matrix.dim(1) * static_cast<int64_t>(sizeof(T));
  const void* const data = matrix.data;
  return {.peers = peers_of(memory),
          .matrix = static_cast<std::byte*>(const_cast<void*>(data)),
          .rows = matrix.dim(0),
          .bytes = bytes,
          .region = 0,
          .alignment = bits_of(data) | bytes | memory.capacity.bias_bytes};
}

void run(const char* op, void* stream, void (*kernel)(BiasParams), const BiasParams& params) {
  launch({op, stream, ceil_div<int64_t>(params.rows, kWarps)}, kernel, params);
}

}  // namespace

void send_bias(const SendBiasArgs& args, void* stream) {
  BiasParams b2 = params_of(args.memory, args.b2), sums = params_of(args.memory, args.sums);
  b2.region = b2.peers.at.b2, sums.region = sums.peers.at.b2_sums;
  run("send_bias", stream, send_bias_kernel, b2);
  run("send_bias", stream, send_bias_kernel, sums);
}

void receive_bias(const ReceiveBiasArgs& args, void* stream) {
  BiasParams b2 = params_of(args.memory, args.b2), sums = params_of(args.memory, args.sums);
  b2.region = b2.peers.at.b2, sums.region = sums.peers.at.b2_sums;
  sums.first = args.memory.rank * sums.peers.local_experts;
  run("receive_bias", stream, receive_bias_kernel, b2);
  run("receive_bias", stream, receive_bias_kernel, sums);
}

}  // namespace moxie::cuda
