// Rows on their way: tokens to the ranks of their experts, out of the shared memory, and results
// into it. One warp moves a row.
#include "moxie/core/copy_rows/copy_row.cuh"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/exchange/destinations.cuh"

namespace moxie::cuda {
namespace {

struct SendParams {
  Peers peers;
  TokenSlots slots;
  const std::byte *data, *scale;
  int64_t tokens, data_bytes, scale_bytes;
  uint64_t data_alignment, scale_alignment;
};

// One warp per token: read once, stored at every other rank that it goes to.
__global__ __launch_bounds__(kThreads) void send_kernel(const __grid_constant__ SendParams p) {
  __shared__ std::byte* destinations[kWarps][kMaxTopK];
  const int64_t token = work_index() * kWarps + warp_index();
  if (token >= p.tokens || p.peers.has_failed()) return;
  std::byte** const to = destinations[warp_index()];
  const int count = find_destinations(p.peers, p.slots, token, to).peers;
  if (count == 0) return;
  copy_row(p.data + token * p.data_bytes, to, count, 0, p.data_bytes, p.data_alignment);
  copy_row(p.scale + token * p.scale_bytes, to, count, p.data_bytes, p.scale_bytes,
           p.scale_alignment);
}

struct PairsParams {
  Peers peers;
  const int32_t* experts;
  int32_t* row_token;
  float* row_weight;
  int64_t limit, tokens;
};

__global__ __launch_bounds__(kThreads) void pairs_kernel(const __grid_constant__ PairsParams p) {
  const int64_t r = work_index() * kThreads + threadIdx.x;
  if (r >= p.limit) return;
  const bool failed = p.peers.has_failed();
  int32_t token = 0;
  float weight = failed ? __int_as_float(0x7fffffff) : 0.f;
  if (!failed && r < p.experts[p.peers.local_experts - 1]) {
    token = p.peers.own<int32_t>(p.peers.at.row_token)[r];
    weight = p.peers.own<float>(p.peers.at.row_weight)[r];
  }
  p.row_token[r] = min<int32_t>(max<int32_t>(token, 0), static_cast<int32_t>(p.tokens) - 1);
  p.row_weight[r] = weight;
}

// Which tokens gather_kernel reads. Not told by a pointer: a rank without tokens has none to `own`.
enum class Tokens { kSent, kKept };

struct GatherParams {
  Peers peers;
  Tokens tokens;
  const std::byte *here, *here_scale;          // tokens sent or kept
  const std::byte *received, *received_scale;  // in the shared memory
  int64_t received_stride;
  const int32_t* end;        // of the rows to make
  const int32_t* own_range;  // of own tokens among those received: begin, end
  const int32_t* row_token;  // or nullptr
  const int32_t* own;        // of kSent
  std::byte *data, *scale;
  int64_t rows, data_bytes, scale_bytes;
  uint64_t data_alignment, scale_alignment;
};

// One warp per row.
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ GatherParams p) {
  const int64_t r = work_index() * kWarps + warp_index();
  if (r >= min<int64_t>(*p.end, p.rows)) return;
  std::byte* const data = p.data + r * p.data_bytes;
  std::byte* const scale = p.scale + r * p.scale_bytes;
  if (p.peers.has_failed()) {
    fill_nan(data, p.data_bytes);
    return fill_nan(scale, p.scale_bytes);
  }
  int64_t token = p.row_token ? p.row_token[r] : r;
  const int32_t begin = p.own_range[0];
  const bool is_sent = p.tokens == Tokens::kSent;
  const bool is_here = !is_sent || (token >= begin && token < p.own_range[1]);
  if (is_sent && is_here) token = p.own[token - begin];
  const std::byte* const from =
      is_here ? p.here + token * p.data_bytes : p.received + token * p.received_stride;
  const std::byte* const from_scale =
      is_here ? p.here_scale + token * p.scale_bytes : p.received_scale + token * p.received_stride;
  copy_row(from, &data, 1, 0, p.data_bytes, p.data_alignment);
  copy_row(from_scale, &scale, 1, 0, p.scale_bytes, p.scale_alignment);
}

struct SendRowsParams {
  Peers peers;
  const int32_t* experts;  // [expert_places()]
  const std::byte* rows;   // may be nullptr
  const float* of_pairs;   // may be nullptr
  int64_t limit, row_bytes;
  uint64_t alignment;
};

// One warp per row. Rows of own tokens are not moved.
__global__ __launch_bounds__(kThreads) void send_rows_kernel(
    const __grid_constant__ SendRowsParams p) {
  const int64_t r = work_index() * kWarps + warp_index();
  const int experts = p.peers.local_experts;
  if (r >= min<int64_t>(p.experts[experts - 1], p.limit) || p.peers.has_failed()) return;
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.experts[middle] > r)
      high = middle;
    else
      low = middle + 1;
  }
  if (r >= p.experts[experts + low] && r < p.experts[2 * experts + low]) return;
  if (p.rows) {
    std::byte* const to = p.peers.own<std::byte>(p.peers.at.rows) + r * p.row_bytes;
    copy_row(p.rows + r * p.row_bytes, &to, 1, 0, p.row_bytes, p.alignment);
  }
  if (p.of_pairs && lane_index() == 0)
    p.peers.own<float>(p.peers.at.row_gradient)[r] = p.of_pairs[r];
}

int64_t ctas(int64_t warps) { return ceil_div<int64_t>(warps, kWarps); }

}  // namespace

void send_tokens(const SendTokensArgs& args, void* stream) {
  constexpr const char* kOp = "send_tokens";
  const auto& [data, scale] = args.tokens;
  const int64_t tokens = data.dim(0), row_bytes = wire_row_bytes(data.dim(1), scale.dim(1));
  const SendParams params{.peers = peers_of(args.memory),
                          .slots = token_slots(args.slots, tokens, args.limits.tokens, row_bytes),
                          .data = data.data,
                          .scale = scale.data,
                          .tokens = tokens,
                          .data_bytes = data.dim(1),
                          .scale_bytes = scale.dim(1),
                          .data_alignment = bits_of(data.data) | data.dim(1),
                          .scale_alignment = bits_of(scale.data) | scale.dim(1) | data.dim(1)};
  launch({kOp, stream, ctas(tokens)}, send_kernel, params);
  launch_meet(kOp, args.memory, args.step, stream);
}

void receive_pairs(const ReceivePairsArgs& args, void* stream) {
  launch({"receive_pairs", stream, ceil_div<int64_t>(args.limits.rows, kThreads)}, pairs_kernel,
         PairsParams{.peers = peers_of(args.memory),
                     .experts = args.experts.data,
                     .row_token = args.row_token.data,
                     .row_weight = args.row_weight.data,
                     .limit = args.limits.rows,
                     .tokens = max<int64_t>(args.limits.tokens, 1)});
}

void gather_rows(const GatherRowsArgs& args, void* stream) {
  const SharedMemory& memory = args.memory;
  const auto& [data, scale] = args.rows;
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const int64_t data_bytes = data.dim(1), scale_bytes = scale.dim(1);
  // Rows in the shared memory begin at multiples of kWireAlignment.
  const std::byte* const received =
      memory.base[static_cast<size_t>(memory.rank)] + regions_of(memory.capacity).tokens;
  const GatherParams params{
      .peers = peers_of(memory),
      .tokens = args.own ? Tokens::kSent : Tokens::kKept,
      .here = args.tokens.data.data,
      .here_scale = args.tokens.scale.data,
      .received = received,
      .received_scale = received + data_bytes,
      .received_stride = wire_row_bytes(data_bytes, scale_bytes),
      .end = args.experts.data + (args.row_token ? local - 1 : 3 * local),
      .own_range = args.experts.data + 3 * local + 1,
      .row_token = args.row_token ? args.row_token->data : nullptr,
      .own = args.own ? args.own->data : nullptr,
      .data = data.data,
      .scale = scale.data,
      .rows = data.dim(0),
      .data_bytes = data_bytes,
      .scale_bytes = scale_bytes,
      .data_alignment = bits_of(data.data) | bits_of(args.tokens.data.data) | data_bytes,
      .scale_alignment = bits_of(scale.data) | bits_of(args.tokens.scale.data) | scale_bytes |
                         (args.own ? data_bytes : 0)};
  launch({"gather_rows", stream, ctas(params.rows)}, gather_kernel, params);
}

void send_rows(const SendRowsArgs& args, void* stream) {
  constexpr const char* kOp = "send_rows";
  const bool has_rows = args.rows.has_value();
  const int64_t limit = has_rows ? args.rows->dim(0) : args.of_pairs ? args.of_pairs->dim(0) : 0;
  SendRowsParams params{.peers = peers_of(args.memory),
                        .experts = args.experts.data,
                        .rows = nullptr,
                        .of_pairs = args.of_pairs ? args.of_pairs->data : nullptr,
                        .limit = limit,
                        .row_bytes = 0,
                        .alignment = 0};
  if (has_rows) {
    params.rows = static_cast<const std::byte*>(args.rows->data);
    params.row_bytes = args.rows->dim(1) * bytes_of(args.rows->format);
    params.alignment = bits_of(params.rows) | params.row_bytes;
  }
  // One rank has no peers.
  if (args.memory.capacity.ranks > 1) launch({kOp, stream, ctas(limit)}, send_rows_kernel, params);
  launch_meet(kOp, args.memory, args.step, stream);
}

}  // namespace moxie::cuda
