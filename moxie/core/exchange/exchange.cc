#include "moxie/core/exchange/exchange.h"

#include <limits>

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/route/route.h"

namespace moxie {
namespace {

int64_t local_experts(const SharedMemory& memory) {
  return memory.capacity.experts / memory.capacity.ranks;
}

void check_memory(const char* op, const SharedMemory& memory) {
  const Capacity& capacity = memory.capacity;
  MOXIE_CHECK(capacity.ranks >= 1 && capacity.ranks <= kMaxRanks, op, ": there must be 1 to ",
              kMaxRanks, " ranks, got ", capacity.ranks);
  MOXIE_CHECK(capacity.experts >= 1 && capacity.experts <= kMaxGroups &&
                  capacity.experts % capacity.ranks == 0,
              op, ": there must be 1 to ", kMaxGroups, " experts, a multiple of the ",
              capacity.ranks, " ranks, got ", capacity.experts);
  MOXIE_CHECK(memory.rank >= 0 && memory.rank < capacity.ranks, op, ": rank must be 0 to ",
              capacity.ranks - 1, ", got ", memory.rank);
}

void check_limits(const char* op, const SharedMemory& memory, const ExchangeLimits& limits) {
  // After a failure every expert gets a row of NaN.
  MOXIE_CHECK(limits.rows >= local_experts(memory) && limits.rows <= memory.capacity.rows, op,
              ": the limit of rows must be that of a row for each of the ", local_experts(memory),
              " experts to the ", memory.capacity.rows, " of the shared memory, got ", limits.rows);
  MOXIE_CHECK(limits.tokens >= 0 && limits.tokens <= std::numeric_limits<int32_t>::max(), op,
              ": the limit of tokens must fit int32, got ", limits.tokens);
}

void check_experts(const char* op, const SharedMemory& memory, const Shape& shape) {
  check_memory(op, memory);
  check_shape(op, "experts", shape, {expert_places(local_experts(memory))});
}

// slots [3, T * k] -> T * k
int64_t check_slots(const char* op, const Shape& slots, int64_t tokens) {
  MOXIE_CHECK(slots.dims == 2 && slots[0] == 3, op, ": slots must be [3, tokens * top_k], got ",
              slots);
  MOXIE_CHECK(tokens == 0 ? slots[1] == 0 : slots[1] % tokens == 0, op,
              ": slots must be a multiple of the ", tokens, " tokens, got ", slots[1]);
  MOXIE_CHECK(tokens == 0 || slots[1] / tokens <= kMaxTopK, op, ": top_k must be at most ",
              kMaxTopK, ", got ", tokens == 0 ? 0 : slots[1] / tokens);
  return slots[1];
}

template <class Byte>
int64_t wire_row(const RowBytes<Byte>& rows) {
  return wire_row_bytes(rows.data.dim(1), rows.scale.dim(1));
}

template <class Byte>
void check_rows(const char* op, const char* argument, const RowBytes<Byte>& rows) {
  MOXIE_CHECK(rows.data.shape.dims == 2 && rows.scale.shape.dims == 2, op, ": ", argument,
              " must be matrices of bytes, got ", rows.data.shape, " and ", rows.scale.shape);
  MOXIE_CHECK(rows.data.dim(0) == rows.scale.dim(0), op, ": ", argument,
              " must have as many rows as scales, got ", rows.data.dim(0), " and ",
              rows.scale.dim(0));
}

void check_sent(const char* op, const SendTokensArgs& args) {
  check_memory(op, args.memory);
  check_limits(op, args.memory, args.limits);
  check_rows(op, "tokens", args.tokens);
  check_slots(op, args.slots.shape, args.tokens.data.dim(0));
  const int64_t bytes = wire_row(args.tokens);
  MOXIE_CHECK(args.limits.tokens * bytes <= args.memory.capacity.token_bytes, op, ": ",
              args.limits.tokens, " tokens of ", bytes, " bytes must fit the ",
              args.memory.capacity.token_bytes, " bytes of the shared memory");
}

// A matrix with so many rows, or none, whose rows fit the memory of an expert's b2.
template <class T>
void check_bias(const char* op, const char* argument, const SharedMemory& memory,
                const View<T>& matrix, int64_t rows) {
  MOXIE_CHECK(matrix.shape.dims == 2 && (matrix.dim(0) == rows || matrix.dim(0) == 0), op, ": ",
              argument, " must be a matrix of ", rows, " rows, or of none, got ", matrix.shape);
  const int64_t bytes = matrix.dim(1) * static_cast<int64_t>(sizeof(T));
  MOXIE_CHECK(matrix.dim(0) == 0 || bytes <= memory.capacity.bias_bytes, op, ": a row of ",
              argument, " has ", bytes, " bytes and must fit the ", memory.capacity.bias_bytes,
              " bytes of the shared memory");
}

// Only where the host can read them; on a GPU, kernels clamp them.
void check_route(const char* op, const ExchangePlacesArgs& args) {
  const int64_t count = args.row_of.dim(0);
  check_offs(op, args.offs, count, "rows", Backend::kRef);
  const int32_t end = args.offs.data[args.offs.dim(0) - 1];
  MOXIE_CHECK(end == count, op, ": offs must end at the ", count, " rows of these tokens, got ",
              end);
  for (int64_t i = 0; i < count; ++i)
    MOXIE_CHECK(args.row_of.data[i] >= 0 && args.row_of.data[i] < count, op,
                ": row_of must be 0 to ", count - 1, ", got ", args.row_of.data[i], " at ", i);
}

}  // namespace

void exchange_places(const ExchangePlacesArgs& args, const Exec& exec) {
  constexpr const char* kOp = "exchange_places";
  check_memory(kOp, args.memory);
  check_limits(kOp, args.memory, args.limits);
  const Capacity& capacity = args.memory.capacity;
  MOXIE_CHECK(args.weights.shape.dims == 2, kOp, ": weights must be [tokens, top_k], got ",
              args.weights.shape);
  const int64_t tokens = args.weights.dim(0), count = args.weights.dim(1) * tokens;
  check_shape(kOp, "slots", args.slots.shape, {3, count});
  check_slots(kOp, args.slots.shape, tokens);
  check_shape(kOp, "row_of", args.row_of.shape, {count});
  check_shape(kOp, "offs", args.offs.shape, {capacity.experts});
  check_shape(kOp, "experts", args.experts.shape, {expert_places(local_experts(args.memory))});
  check_shape(kOp, "own", args.own.shape, {tokens});
  if (exec.backend == Backend::kCuda)
    check_shape(kOp, "workspace", args.workspace.shape,
                {exchange_workspace(tokens, capacity.ranks, capacity.experts)});
  else
    check_route(kOp, args);
  dispatch(
      kOp, exec, [&] { ref::exchange_places(args); },
      [&](auto stream) { cuda::exchange_places(args, stream); });
}

void send_tokens(const SendTokensArgs& args, const Exec& exec) {
  constexpr const char* kOp = "send_tokens";
  check_sent(kOp, args);
  dispatch(
      kOp, exec, [&] { ref::send_tokens(args); },
      [&](auto stream) { cuda::send_tokens(args, stream); });
}

void send_quantized(const SendQuantizedArgs& args, const Exec& exec) {
  constexpr const char* kOp = "send_quantized";
  MOXIE_CHECK(args.x.shape.dims == 2, kOp, ": x must be [tokens, dim], got ", args.x.shape);
  MOXIE_CHECK(args.tokens.block.rows == 1 && args.tokens.layout == ScaleLayout::kPlain, kOp,
              ": tokens must have plain scales for blocks of one row, got blocks of ",
              args.tokens.block.rows, " x ", args.tokens.block.cols);
  check_forms(kOp, args.x.shape, forms_of(as_quantize(args)), exec.backend);
  check_sent(kOp, as_send_tokens(args));
  dispatch(
      kOp, exec, [&] { ref::send_quantized(args); },
      [&](auto stream) { cuda::send_quantized(args, stream); });
}

void receive_pairs(const ReceivePairsArgs& args, const Exec& exec) {
  constexpr const char* kOp = "receive_pairs";
  check_experts(kOp, args.memory, args.experts.shape);
  check_limits(kOp, args.memory, args.limits);
  check_shape(kOp, "row_token", args.row_token.shape, {args.limits.rows});
  check_shape(kOp, "row_weight", args.row_weight.shape, {args.limits.rows});
  dispatch(
      kOp, exec, [&] { ref::receive_pairs(args); },
      [&](auto stream) { cuda::receive_pairs(args, stream); });
}

void gather_rows(const GatherRowsArgs& args, const Exec& exec) {
  constexpr const char* kOp = "gather_rows";
  check_experts(kOp, args.memory, args.experts.shape);
  check_rows(kOp, "rows", args.rows);
  if (args.row_token) check_shape(kOp, "row_token", args.row_token->shape, {args.rows.data.dim(0)});
  check_rows(kOp, "tokens", args.tokens);
  MOXIE_CHECK(args.tokens.data.dim(1) == args.rows.data.dim(1) &&
                  args.tokens.scale.dim(1) == args.rows.scale.dim(1),
              kOp, ": tokens and rows must have as many columns, got ", args.tokens.data.dim(1),
              " and ", args.rows.data.dim(1));
  if (args.own) check_shape(kOp, "own", args.own->shape, {args.tokens.data.dim(0)});
  dispatch(
      kOp, exec, [&] { ref::gather_rows(args); },
      [&](auto stream) { cuda::gather_rows(args, stream); });
}

void send_rows(const SendRowsArgs& args, const Exec& exec) {
  constexpr const char* kOp = "send_rows";
  check_experts(kOp, args.memory, args.experts.shape);
  const Capacity& capacity = args.memory.capacity;
  if (args.rows) {
    MOXIE_CHECK(args.rows->shape.dims == 2, kOp, ": rows must be a matrix, got ", args.rows->shape);
    const int64_t bytes = numel(args.rows->shape) * bytes_of(args.rows->format);
    MOXIE_CHECK(capacity.ranks == 1 || bytes <= capacity.row_bytes, kOp, ": ", args.rows->dim(0),
                " rows of ", bytes, " bytes must fit the ", capacity.row_bytes,
                " bytes of the shared memory");
  }
  if (args.of_pairs)
    MOXIE_CHECK(args.of_pairs->dim(0) <= capacity.rows, kOp, ": of_pairs must be at most the ",
                capacity.rows, " rows of the shared memory, got ", args.of_pairs->dim(0));
  dispatch(
      kOp, exec, [&] { ref::send_rows(args); },
      [&](auto stream) { cuda::send_rows(args, stream); });
}

void combine(const CombineArgs& args, const Exec& exec) {
  constexpr const char* kOp = "combine";
  check_memory(kOp, args.memory);
  check_limits(kOp, args.memory, args.limits);
  MOXIE_CHECK(args.slots.shape.dims == 2 && args.slots.dim(0) == 3, kOp,
              ": slots must be [3, tokens * top_k], got ", args.slots.shape);
  if (args.rows) {
    check_slots(kOp, args.slots.shape, args.x.dim(0));
    check_shape(kOp, "rows", args.rows->shape, {args.limits.rows, args.x.dim(1)});
    MOXIE_CHECK(args.rows->format == args.x.format, kOp,
                ": input and result must have the same format, got ", name(args.rows->format),
                " and ", name(args.x.format));
  }
  if (args.of_pairs) {
    check_shape(kOp, "of_pairs", args.of_pairs->shape, {args.limits.rows});
    MOXIE_CHECK(numel(args.of_slots.shape) == args.slots.dim(1), kOp,
                ": of_slots must have a value per slot, got ", args.of_slots.shape);
  }
  dispatch(
      kOp, exec, [&] { ref::combine(args); }, [&](auto stream) { cuda::combine(args, stream); });
}

void send_bias(const SendBiasArgs& args, const Exec& exec) {
  constexpr const char* kOp = "send_bias";
  check_memory(kOp, args.memory);
  check_bias(kOp, "b2", args.memory, args.b2, local_experts(args.memory));
  check_bias(kOp, "sums", args.memory, args.sums, args.memory.capacity.experts);
  dispatch(
      kOp, exec, [&] { ref::send_bias(args); },
      [&](auto stream) { cuda::send_bias(args, stream); });
}

void receive_bias(const ReceiveBiasArgs& args, const Exec& exec) {
  constexpr const char* kOp = "receive_bias";
  check_memory(kOp, args.memory);
  check_bias(kOp, "b2", args.memory, args.b2, args.memory.capacity.experts);
  check_bias(kOp, "sums", args.memory, args.sums, args.memory.capacity.experts);
  dispatch(
      kOp, exec, [&] { ref::receive_bias(args); },
      [&](auto stream) { cuda::receive_bias(args, stream); });
}

}  // namespace moxie
