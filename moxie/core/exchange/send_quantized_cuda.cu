// Quantizes tokens and stores their rows where they go, one warp per token: x is read once, and
// nothing is written that is only read again to be sent. Neighbouring lanes have the elements of a
// block, so a shuffle finds its amax.
#include <bit>

#include "moxie/core/copy_rows/copy_row.cuh"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/destinations.cuh"
#include "moxie/core/format/e8m0.cuh"
#include "moxie/core/ptx/e4m3_convert.cuh"
#include "moxie/core/ptx/magnitude.cuh"
#include "moxie/core/quantize/quantize.h"

namespace moxie::cuda {
namespace {

constexpr int kPiece = 8;             // elements of a lane
constexpr int kMostScales = 1 << 10;  // of a row: 8 KB of shared memory for a CTA

struct SendQuantizedParams {
  Peers peers;
  TokenSlots slots;
  const void* x;
  std::byte *data, *scale;  // this rank's tokens
  int64_t tokens, dim, scale_bytes;
  int block;
  ScaleChoice choice;
};

__device__ void load_piece(const float* from, float (&x)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 4)
    *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + i);
}

__device__ void load_piece(const uint16_t* from, float (&x)[kPiece]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    x[i] = std::bit_cast<float>(pairs[i / 2] << 16);
    x[i + 1] = std::bit_cast<float>(pairs[i / 2] & 0xffff0000u);
  }
}

// The code of the block that these elements belong to.
__device__ uint32_t block_code(const SendQuantizedParams& p, const float (&x)[kPiece]) {
  uint32_t amax = 0;
#pragma unroll
  for (const float value : x) amax = ptx::max_magnitude(amax, std::bit_cast<uint32_t>(value));
  for (int step = 1; step < p.block / kPiece; step *= 2)
    amax = ptx::max_magnitude(amax, __shfl_xor_sync(~0u, amax, step));
  return code_of(amax & 0x7fffffffu, p.choice);
}

template <class T>
__global__ __launch_bounds__(kThreads) void send_quantized_kernel(
    const __grid_constant__ SendQuantizedParams p) {
  __shared__ std::byte* destinations[kWarps][kMaxTopK];
  __shared__ __align__(sizeof(uint4)) std::byte scales[kWarps][kMostScales];
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens || p.peers.has_failed()) return;
  std::byte** const to = destinations[warp_index()];
  std::byte* const scale = scales[warp_index()];
  const Destinations found = find_destinations(p.peers, p.slots, token, to);
  std::byte* const own = p.data + token * p.dim;
  const T* const row = static_cast<const T*>(p.x) + token * p.dim;
  for (int64_t first = 0; first < p.dim; first += kWarp * kPiece) {
    const int64_t col = first + lane_index() * kPiece;
    float x[kPiece] = {};
    if (col < p.dim) load_piece(row + col, x);
    const uint32_t code = block_code(p, x);
    const float inverse = inverse_of(code);
#pragma unroll
    for (float& value : x) value *= inverse;
    const uint2 bytes{ptx::encode4(x), ptx::encode4(x + 4)};
    if (col >= p.dim) continue;  // the last turn: no lane waits for another any more
    if (found.is_own) *reinterpret_cast<uint2*>(own + col) = bytes;
    for (int d = 0; d < found.peers; ++d) *reinterpret_cast<uint2*>(to[d] + col) = bytes;
    if (col % p.block == 0) scale[col / p.block] = static_cast<std::byte>(code);
  }
  __syncwarp();
  const auto count = static_cast<uint64_t>(p.scale_bytes);
  copy_row(scale, to, found.peers, p.dim, p.scale_bytes, count | static_cast<uint64_t>(p.dim));
  if (!found.is_own) return;
  std::byte* const own_scale = p.scale + token * p.scale_bytes;
  copy_row(scale, &own_scale, 1, 0, p.scale_bytes, std::bit_cast<uint64_t>(own_scale) | count);
}

// Whether rows are whole pieces and everything is aligned to them.
bool fits_kernel(const SendQuantizedArgs& args) {
  const uint64_t addresses = bits_of(args.x.data) | bits_of(args.tokens.qdata.data);
  return args.x.dim(1) % (2 * kPiece) == 0 && addresses % sizeof(uint4) == 0 &&
         args.tokens.scale.dim(1) <= kMostScales;
}

}  // namespace

void send_quantized(const SendQuantizedArgs& args, void* stream) {
  constexpr const char* kOp = "send_quantized";
  const int64_t tokens = args.x.dim(0), dim = args.x.dim(1), scales = args.tokens.scale.dim(1);
  // One rank has no peers, and the quantizer is faster.
  if (args.memory.capacity.ranks == 1 || !fits_kernel(args)) {
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
      .dim = dim,
      .scale_bytes = scales,
      .block = args.tokens.block.cols,
      .choice = choice_of(args.rule)};
  launch({kOp, stream, ceil_div<int64_t>(tokens, kWarps)},
         args.x.format == Format::kF32 ? send_quantized_kernel<float>
                                       : send_quantized_kernel<uint16_t>,
         params);
  launch_meet(kOp, args.memory, args.step, stream);
}

}  // namespace moxie::cuda
