#include "moxie/torch/exchange/legs.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace moxie::ops {
namespace {

Tensor bytes_of(const Tensor& matrix) { return dense(matrix).view(at::kByte); }

// The rows of a message, as bytes: elements, then their scales if there are any, then zeros up to
// the row size of core/layout/wire.h.
Tensor as_rows(const Tensor& elements, const OptionalTensor& scale) {
  std::vector<Tensor> parts{elements};
  if (scale) parts.push_back(*scale);
  const int64_t scale_bytes = scale ? scale->size(1) : 0;
  const int64_t padding =
      wire_row_bytes(elements.size(1), scale_bytes) - elements.size(1) - scale_bytes;
  if (padding) parts.push_back(elements.new_zeros({elements.size(0), padding}));
  return parts.size() == 1 ? elements : at::cat(parts, 1);
}

// Copies a range of byte columns out of the rows, as a matrix of another dtype.
Tensor columns(const Tensor& rows, int64_t first, int64_t bytes, at::ScalarType dtype) {
  return rows.narrow(1, first, bytes).contiguous().view(dtype);
}

// One half of the messages to send: the token rows, or what belongs to (token, expert) pairs.
struct Part {
  const Tensor& bytes;  // uint8 [sum of counts, width], in order of rank; width 0 if none are sent
  const std::vector<int64_t>& counts;

  int64_t width() const { return bytes.size(1); }
  int64_t bytes_of(size_t rank) const { return counts[rank] * width(); }
};
// The sizes of one half (rows or pairs) of the messages to receive.
struct PartFormat {
  int64_t width;
  const std::vector<int64_t>& counts;

  int64_t bytes_of(size_t rank) const { return counts[rank] * width; }
};

template <class First, class Second>
std::vector<int64_t> sizes_of(const First& rows, const Second& pairs) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < rows.counts.size(); ++i)
    sizes.push_back(rows.bytes_of(i) + pairs.bytes_of(i));
  return sizes;
}

// Joins both halves into messages: for each rank its rows, then its pairs.
Tensor packed_messages(const Part& rows, const Part& pairs) {
  if (pairs.width() == 0) return rows.bytes.flatten();
  if (rows.width() == 0) return pairs.bytes.flatten();
  std::vector<Tensor> pieces;
  int64_t row = 0, pair = 0;
  for (size_t i = 0; i < rows.counts.size(); ++i) {
    pieces.push_back(rows.bytes.narrow(0, row, rows.counts[i]).flatten());
    pieces.push_back(pairs.bytes.narrow(0, pair, pairs.counts[i]).flatten());
    row += rows.counts[i], pair += pairs.counts[i];
  }
  return at::cat(pieces);
}

// Splits received messages into their rows and their pairs, uint8 [count, width] each, in order of
// rank.
std::pair<Tensor, Tensor> unpacked_messages(const Tensor& received, const PartFormat& rows,
                                            const PartFormat& pairs) {
  const Tensor none = received.new_empty({0});
  if (pairs.width == 0) return {received.view({-1, rows.width}), none};
  if (rows.width == 0) return {none, received.view({-1, pairs.width})};
  std::vector<Tensor> of_rows, of_pairs;
  int64_t at = 0;
  for (size_t i = 0; i < rows.counts.size(); ++i) {
    of_rows.push_back(received.narrow(0, at, rows.bytes_of(i)));
    of_pairs.push_back(received.narrow(0, at + rows.bytes_of(i), pairs.bytes_of(i)));
    at += rows.bytes_of(i) + pairs.bytes_of(i);
  }
  return {at::cat(of_rows).view({-1, rows.width}), at::cat(of_pairs).view({-1, pairs.width})};
}

// For each (token, expert) pair to send: int32 index of the token's row in the message, f32 routing
// weight.
Tensor pairs_of_x(const Places& places, const Weights& weights) {
  const Tensor by_row = dense(weights.of_slots).flatten().index_select(0, weights.slot_of);
  const Tensor pairs = at::stack({places.row_in_message, by_row.view(at::kInt)}, 1);
  return pairs.view(at::kByte).view({-1, kPairOfXBytes});
}

// Reads the pairs that arrived and puts them in the order of the experts' rows.
void read_pairs(const Tensor& pairs, const Places& places, Dispatched& out) {
  const Tensor both = pairs.view(at::kInt);  // [in pairs, 2]
  int64_t before = 0;
  std::vector<int64_t> first;
  for (const int64_t count : places.in.tokens) first.push_back(before), before += count;
  const auto on_host = at::TensorOptions(at::kLong);
  const Tensor of_rank = at::tensor(first, on_host).to(pairs.device());
  const Tensor counts = at::tensor(places.in.pairs, on_host).to(pairs.device());
  const Tensor first_of_pair =
      at::repeat_interleave(of_rank, counts, std::nullopt, places.in.num_pairs());
  const Tensor token = both.select(1, 0) + first_of_pair;
  out.token_of = token.index_select(0, places.arrival_of);
  out.weights = both.select(1, 1).index_select(0, places.arrival_of).view(at::kFloat);
}

}  // namespace

Dispatched dispatch_tokens(const DispatchArgs& args, const std::optional<Weights>& weights) {
  const auto& [group, places, tokens, what] = args;
  const at::ScalarType dtype = tokens.data.scalar_type();
  const Tensor elements = bytes_of(tokens.data);
  OptionalTensor scale;
  if (tokens.scale) scale = bytes_of(*tokens.scale);
  const Tensor rows = as_rows(elements, scale).index_select(0, places.token_of);
  const Tensor pairs =
      weights ? pairs_of_x(places, *weights) : rows.new_empty({places.out.num_pairs(), 0});
  const Part rows_out{rows, places.out.tokens}, pairs_out{pairs, places.out.pairs};
  const PartFormat rows_in{rows.size(1), places.in.tokens};
  const PartFormat pairs_in{pairs.size(1), places.in.pairs};
  const Tensor received =
      group.all_to_all(packed_messages(rows_out, pairs_out),
                       {sizes_of(rows_out, pairs_out), sizes_of(rows_in, pairs_in)}, what);
  const auto [rows_received, pairs_received] = unpacked_messages(received, rows_in, pairs_in);
  Dispatched out;
  out.tokens.data = columns(rows_received, 0, elements.size(1), dtype);
  if (scale)
    out.tokens.scale =
        columns(rows_received, elements.size(1), scale->size(1), tokens.scale->scalar_type());
  if (weights) read_pairs(pairs_received, places, out);
  return out;
}

Combined combine_rows(const CombineArgs& args) {
  const auto& [group, places, rows, of_pairs, what] = args;
  const auto& arrival = places.row_of_arrival;
  const auto of_arrival = [&](const Tensor& matrix) {
    return bytes_of(matrix).index_select(0, arrival);
  };
  const Tensor nothing = at::empty({places.in.num_pairs(), 0}, arrival.options().dtype(at::kByte));
  const Tensor row_bytes = rows.defined() ? as_rows(of_arrival(rows), {}) : nothing;
  const Tensor pair_bytes =
      of_pairs.defined() ? of_arrival(of_pairs.unsqueeze(1)).view({-1, kPairOfDxBytes}) : nothing;
  const Part rows_out{row_bytes, places.in.pairs}, pairs_out{pair_bytes, places.in.pairs};
  const PartFormat rows_in{row_bytes.size(1), places.out.pairs};
  const PartFormat pairs_in{pair_bytes.size(1), places.out.pairs};
  const Tensor received =
      group.all_to_all(packed_messages(rows_out, pairs_out),
                       {sizes_of(rows_out, pairs_out), sizes_of(rows_in, pairs_in)}, what);
  const auto [rows_received, pairs_received] = unpacked_messages(received, rows_in, pairs_in);
  Combined out;
  if (rows.defined())
    out.rows = columns(rows_received, 0, rows.size(1) * rows.element_size(), rows.scalar_type());
  if (of_pairs.defined()) out.of_pairs = pairs_received.view(at::kFloat).flatten();
  return out;
}

}  // namespace moxie::ops
