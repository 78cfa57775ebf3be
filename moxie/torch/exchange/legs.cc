#include "moxie/torch/exchange/legs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "moxie/torch/exchange/messages.h"

namespace moxie::ops {
namespace {

int64_t row_bytes_of(const TokenFormat& format) {
  return wire_row_bytes(format.data_bytes(), format.scale_bytes());
}

// Zeros from byte `used` of each row of `width` bytes on.
void pad_rows(const Messages& messages, const Tensor& buffer, int64_t used, int64_t width) {
  if (used == width) return;
  const RowPlaces zeros{.buffer = at::zeros({width - used}, buffer.options()), .stride = 0};
  copy_rows(messages.num_rows(), width - used, zeros, messages.rows_in(buffer, used));
}

Messages messages_of(const Traffic& traffic, const TokenFormat& format, int64_t pair_bytes) {
  return {{traffic.tokens, row_bytes_of(format)}, {traffic.pairs, pair_bytes}};
}

// Reads the pairs that arrived, each to the row of the experts that it is for.
void read_pairs(const Messages& in, const Tensor& received, const Places& places, Dispatched& out) {
  const Tensor pairs = at::empty({in.num_pairs(), 2}, received.options().dtype(at::kInt));
  copy_rows(in.num_pairs(), kPairOfXBytes, in.pairs_in(received),
            rows_of_matrix(pairs, places.row_of_arrival));
  out.token_of = pairs.select(1, 0) + places.first_of_row;
  out.weights = pairs.select(1, 1).contiguous().view(at::kFloat);
}

}  // namespace

Tensor pairs_of_x(const Tensor& row_in_message, const Weights& weights) {
  const Tensor by_row = dense(weights.of_slots).flatten().index_select(0, weights.slot_of);
  return at::stack({row_in_message, by_row.view(at::kInt)}, 1);
}

Dispatched dispatch_tokens(const DispatchArgs& args, const Tensor& pairs) {
  const auto& [group, places, tokens, what] = args;
  const TokenFormat format = format_of(tokens);
  const int64_t pair_bytes = pairs.defined() ? kPairOfXBytes : 0;
  const Messages out = messages_of(places.out, format, pair_bytes);
  const Messages in = messages_of(places.in, format, pair_bytes);
  const Tensor sent = at::empty({out.bytes()}, places.token_of.options().dtype(at::kByte));
  const auto send = [&](const Tensor& matrix, int64_t bytes, int64_t column) {
    copy_rows(out.num_rows(), bytes, rows_of_matrix(matrix, places.token_of),
              out.rows_in(sent, column));
  };
  send(tokens.data, format.data_bytes(), 0);
  if (tokens.scale) send(*tokens.scale, format.scale_bytes(), format.data_bytes());
  pad_rows(out, sent, format.data_bytes() + format.scale_bytes(), row_bytes_of(format));
  if (pairs.defined())
    copy_rows(out.num_pairs(), kPairOfXBytes, rows_of_matrix(pairs), out.pairs_in(sent));
  Dispatched made;
  made.tokens = {group.all_to_all(sent, {out.sizes(), in.sizes()}, what), format, pair_bytes};
  if (pairs.defined()) read_pairs(in, made.tokens.messages, places, made);
  return made;
}

Quantized rows_of(const ReceivedTokens& tokens, const Places& places, const Tensor& row_token) {
  const TokenFormat& format = tokens.format;
  const Messages in = messages_of(places.in, format, tokens.pair_bytes);
  const int64_t rows = row_token.size(0);
  const auto read = [&](at::ScalarType dtype, int64_t columns, int64_t bytes, int64_t column) {
    const Tensor made = at::empty({rows, columns}, tokens.messages.options().dtype(dtype));
    RowPlaces from = in.rows_in(tokens.messages, column);
    from.index = row_token;
    copy_rows(rows, bytes, from, rows_of_matrix(made));
    return made;
  };
  Quantized made{read(format.data, format.columns, format.data_bytes(), 0), {}};
  if (format.scale_columns > 0)
    made.scale =
        read(format.scale, format.scale_columns, format.scale_bytes(), format.data_bytes());
  return made;
}

Combined combine_rows(const CombineArgs& args) {
  const auto& [group, places, rows, of_pairs, what] = args;
  const auto& arrival = places.row_of_arrival;
  const int64_t used = rows.defined() ? rows.size(1) * rows.element_size() : 0;
  const int64_t width = wire_row_bytes(used, 0);
  const int64_t pair_bytes = of_pairs.defined() ? kPairOfDxBytes : 0;
  const Messages out({places.in.pairs, width}, {places.in.pairs, pair_bytes});
  const Messages in({places.out.pairs, width}, {places.out.pairs, pair_bytes});
  const Tensor sent = at::empty({out.bytes()}, arrival.options().dtype(at::kByte));
  if (rows.defined()) {
    copy_rows(out.num_rows(), used, rows_of_matrix(rows, arrival), out.rows_in(sent));
    pad_rows(out, sent, used, width);
  }
  if (of_pairs.defined())
    copy_rows(out.num_pairs(), pair_bytes, rows_of_matrix(of_pairs.unsqueeze(1), arrival),
              out.pairs_in(sent));
  const Tensor received = group.all_to_all(sent, {out.sizes(), in.sizes()}, what);
  Combined made;
  if (rows.defined() && used == width && in.rows_are_adjacent()) {
    made.rows = received.narrow(0, 0, in.num_rows() * width)
                    .view(rows.scalar_type())
                    .view({in.num_rows(), rows.size(1)});
  } else if (rows.defined()) {
    made.rows = at::empty({in.num_rows(), rows.size(1)}, rows.options());
    copy_rows(in.num_rows(), used, in.rows_in(received), rows_of_matrix(made.rows));
  }
  if (of_pairs.defined()) {
    made.of_pairs = at::empty({in.num_pairs()}, of_pairs.options());
    copy_rows(in.num_pairs(), pair_bytes, in.pairs_in(received),
              rows_of_matrix(made.of_pairs.unsqueeze(1)));
  }
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
