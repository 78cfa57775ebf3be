#include "moxie/torch/exchange/legs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "moxie/core/message_places/message_places.h"
#include "moxie/torch/exchange/messages.h"
#include "moxie/torch/exec.h"

namespace moxie::ops {
namespace {

int64_t row_bytes_of(const TokenFormat& format) {
  return wire_row_bytes(format.data_bytes(), format.scale_bytes());
}

// Zeros from byte `used` of each row of `width` bytes on.
void pad_rows(const Messages& messages, const Tensor& buffer, int64_t used, int64_t width,
              std::vector<RowCopy>& copies) {
  if (used == width) return;
  const RowPlaces zeros{.buffer = at::zeros({width - used}, buffer.options()), .stride = 0};
  copies.push_back({messages.num_rows(), width - used, zeros, messages.rows_in(buffer, used)});
}

Messages messages_of(const Traffic& traffic, const TokenFormat& format, int64_t pair_bytes) {
  return {{traffic.tokens, row_bytes_of(format)}, {traffic.pairs, pair_bytes}};
}

}  // namespace

Tensor pairs_of_x(const Tensor& row_in_message, const Weights& weights) {
  const Tensor by_row = dense(weights.of_slots).flatten().index_select(0, weights.slot_of);
  return at::stack({row_in_message, by_row.view(at::kInt)}, 1);
}

ReceivedTokens dispatch_tokens(const DispatchArgs& args, const Tensor& pairs) {
  const auto& [group, places, tokens, what] = args;
  const TokenFormat format = format_of(tokens);
  const int64_t pair_bytes = pairs.defined() ? kPairOfXBytes : 0;
  const Messages out = messages_of(places.out, format, pair_bytes);
  const Messages in = messages_of(places.in, format, pair_bytes);
  const Tensor sent = at::empty({out.bytes()}, places.token_of.options().dtype(at::kByte));
  std::vector<RowCopy> copies;
  const auto send = [&](const Tensor& matrix, int64_t bytes, int64_t column) {
    copies.push_back({out.num_rows(), bytes, rows_of_matrix(matrix, places.token_of),
                      out.rows_in(sent, column)});
  };
  send(tokens.data, format.data_bytes(), 0);
  if (tokens.scale) send(*tokens.scale, format.scale_bytes(), format.data_bytes());
  pad_rows(out, sent, format.data_bytes() + format.scale_bytes(), row_bytes_of(format), copies);
  if (pairs.defined())
    copies.push_back({out.num_pairs(), pair_bytes, rows_of_matrix(pairs), out.pairs_in(sent)});
  copy_rows(copies);
  return {group.all_to_all(sent, {out.sizes(), in.sizes()}, what), format, pair_bytes};
}

ReceivedPairs receive_pairs(const ReceivedTokens& x, const Tensor& counts, Places& places) {
  const int64_t pairs = places.in.num_pairs();
  const auto int64 = counts.options().dtype(at::kLong);
  places.offs = at::empty({counts.size(1) - kCountsBesideExperts}, counts.options());
  places.row_of_arrival = at::empty({pairs}, int64);
  const ReceivedPairs made{at::empty({pairs}, int64), at::empty({pairs}, int64.dtype(at::kFloat))};
  const DeviceScope scope(counts.device());
  received_places({.counts = const_view<int32_t>(counts),
                   .messages = {static_cast<const std::byte*>(x.messages.const_data_ptr()),
                                {x.messages.numel()}},
                   .row_bytes = row_bytes_of(x.format),
                   .offs = view<int32_t>(places.offs),
                   .row_of_arrival = view<int64_t>(places.row_of_arrival),
                   .token_of = view<int64_t>(made.token_of),
                   .weights = view<float>(made.weights)},
                  scope.exec());
  return made;
}

Quantized rows_of(const ReceivedTokens& tokens, const Places& places, const Tensor& row_token) {
  const TokenFormat& format = tokens.format;
  const int64_t rows = row_token.size(0);
  std::vector<RowCopy> copies;
  const auto read = [&](at::ScalarType dtype, int64_t columns, int64_t bytes, int64_t column) {
    const Tensor made = at::empty({rows, columns}, tokens.messages.options().dtype(dtype));
    copies.push_back(
        {rows, bytes, rows_apart(tokens, places, row_token, column), rows_of_matrix(made)});
    return made;
  };
  Quantized made{read(format.data, format.columns, format.data_bytes(), 0), {}};
  if (format.scale_columns > 0)
    made.scale =
        read(format.scale, format.scale_columns, format.scale_bytes(), format.data_bytes());
  copy_rows(copies);
  return made;
}

RowPlaces rows_apart(const ReceivedTokens& tokens, const Places& places, const Tensor& row_token,
                     int64_t column) {
  const Messages in = messages_of(places.in, tokens.format, tokens.pair_bytes);
  RowPlaces from = in.rows_in(tokens.messages, column);
  from.index = row_token;
  return from;
}

namespace {

// The messages with rows and pairs of the experts.
Tensor combine_messages(const CombineArgs& args, const Messages& out, int64_t width) {
  const auto& [group, places, rows, of_pairs, what] = args;
  const int64_t used = rows.defined() ? rows.size(1) * rows.element_size() : 0;
  // With one rank, or one expert here, pairs arrive in the order of the rows.
  const bool in_order = places.in.pairs.size() == 1 || places.offs.size(0) == 1;
  if (in_order && rows.defined() && used == width && !of_pairs.defined())
    return dense(rows).view(at::kByte).flatten();
  const auto& arrival = places.row_of_arrival;
  const Tensor sent = at::empty({out.bytes()}, arrival.options().dtype(at::kByte));
  std::vector<RowCopy> copies;
  if (rows.defined()) {
    copies.push_back({out.num_rows(), used, rows_of_matrix(rows, arrival), out.rows_in(sent)});
    pad_rows(out, sent, used, width, copies);
  }
  if (of_pairs.defined())
    copies.push_back({out.num_pairs(), kPairOfDxBytes,
                      rows_of_matrix(of_pairs.unsqueeze(1), arrival), out.pairs_in(sent)});
  copy_rows(copies);
  return sent;
}

}  // namespace

Combined combine_rows(const CombineArgs& args) {
  const auto& [group, places, rows, of_pairs, what] = args;
  const int64_t used = rows.defined() ? rows.size(1) * rows.element_size() : 0;
  const int64_t width = wire_row_bytes(used, 0);
  const int64_t pair_bytes = of_pairs.defined() ? kPairOfDxBytes : 0;
  const Messages out({places.in.pairs, width}, {places.in.pairs, pair_bytes});
  const Messages in({places.out.pairs, width}, {places.out.pairs, pair_bytes});
  const Tensor sent = combine_messages(args, out, width);
  std::vector<RowCopy> reads;
  const Tensor received = group.all_to_all(sent, {out.sizes(), in.sizes()}, what);
  Combined made;
  if (rows.defined() && used == width && in.rows_are_adjacent()) {
    made.rows = received.narrow(0, 0, in.num_rows() * width)
                    .view(rows.scalar_type())
                    .view({in.num_rows(), rows.size(1)});
  } else if (rows.defined()) {
    made.rows = at::empty({in.num_rows(), rows.size(1)}, rows.options());
    reads.push_back({in.num_rows(), used, in.rows_in(received), rows_of_matrix(made.rows)});
  }
  if (of_pairs.defined()) {
    made.of_pairs = at::empty({in.num_pairs()}, of_pairs.options());
    reads.push_back({in.num_pairs(), pair_bytes, in.pairs_in(received),
                     rows_of_matrix(made.of_pairs.unsqueeze(1))});
  }
  copy_rows(reads);
  return made;
}

TokenFormat format_of(const Quantized& tokens) {
  TokenFormat format{.data = tokens.data.scalar_type(), .columns = tokens.data.size(1)};
  if (tokens.scale) {
    format.scale = tokens.scale->scalar_type();
    format.scale_columns = tokens.scale->size(1);
  }
  return format;
}

}  // namespace moxie::ops
