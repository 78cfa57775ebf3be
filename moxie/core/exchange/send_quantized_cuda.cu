// Quantizes tokens and stores their rows where they go, one warp per token: x is read once, and
// nothing is written that is only read again to be sent.
#include "moxie/core/copy_rows/copy_row.cuh"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/destinations.cuh"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/quantize/quantize_row.cuh"

namespace moxie::cuda {
namespace {

struct SendQuantizedParams {
  Peers peers;
  TokenSlots slots;
  const void* x;
  std::byte *data, *scale;  // this rank's tokens
  int64_t tokens, scale_bytes;
  RowQuantizer quantizer;
};

template <class T>
__global__ __launch_bounds__(kThreads) void send_quantized_kernel(
    const __grid_constant__ SendQuantizedParams p) {
  __shared__ std::byte* destinations[kWarps][kMaxTopK];
  __shared__ RowScales scales;
  const int64_t token = work_index() * kWarps + warp_index(), dim = p.quantizer.dim;
  if (token >= p.tokens || p.peers.has_failed()) return;
  std::byte** const to = destinations[warp_index()];
  std::byte* const codes = scales.code[warp_index()];
  const Destinations found = find_destinations(p.peers, p.slots, token, to);
  std::byte* const own = p.data + token * dim;
  p.quantizer.quantize(static_cast<const T*>(p.x) + token * dim, codes,
                       [&](int64_t col, uint2 bytes) {
                         if (found.is_own) *reinterpret_cast<uint2*>(own + col) = bytes;
                         for (int d = 0; d < found.peers; ++d)
                           *reinterpret_cast<uint2*>(to[d] + col) = bytes;
                       });
  const auto count = static_cast<uint64_t>(p.scale_bytes);
  copy_row(codes, to, found.peers, dim, p.scale_bytes, count | static_cast<uint64_t>(dim));
  if (!found.is_own) return;
  std::byte* const own_scale = p.scale + token * p.scale_bytes;
  copy_row(codes, &own_scale, 1, 0, p.scale_bytes, std::bit_cast<uint64_t>(own_scale) | count);
}

}  // namespace

void send_quantized(const SendQuantizedArgs& args, void* stream) {
  constexpr const char* kOp = "send_quantized";
  const int64_t tokens = args.x.dim(0), dim = args.x.dim(1), scales = args.tokens.scale.dim(1);
  // One rank has no peers, and the quantizer is faster.
  if (args.memory.capacity.ranks == 1 || !fits_row_quantizer(args.x, args.tokens)) {
    moxie::quantize(as_quantize(args), {.backend = Backend::kCuda, .stream = stream});
    return send_tokens(as_send_tokens(args), stream);
  }
  const SendQuantizedParams params{
      .peers = peers_of(args.memory),
      .slots = token_slots(args.slots, tokens, args.limits.tokens, wire_row_bytes(dim, scales)),
      .x = args.x.data,
      .data = reinterpret_cast<std::byte*>(args.tokens.qdata.data),
      .scale = reinterpret_cast<std::byte*>(args.tokens.scale.data),
      .tokens = tokens,
      .scale_bytes = scales,
      .quantizer = row_quantizer(dim, args.tokens.block, args.rule)};
  launch({kOp, stream, ceil_div<int64_t>(tokens, kWarps)},
         args.x.format == Format::kF32 ? send_quantized_kernel<float> : send_quantized_kernel<bf16>,
         params);
  launch_meet(kOp, args.memory, args.step, stream);
}

}  // namespace moxie::cuda
