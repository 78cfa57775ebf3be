#include "moxie/torch/exchange/messages.h"

#include "moxie/torch/exec.h"

namespace moxie::ops {

RowPlaces rows_of_matrix(const Tensor& matrix, const OptionalTensor& index) {
  const Tensor rows = dense(matrix);
  return {.buffer = rows, .stride = rows.size(1) * rows.element_size(), .index = index};
}

namespace {

View<std::byte> bytes_of(const RowPlaces& places) {
  return {static_cast<std::byte*>(places.buffer.mutable_data_ptr()),
          {places.buffer.numel() * places.buffer.element_size()}};
}
template <class T>
RowsIn<T> rows_in(const RowPlaces& places, const View<T>& buffer) {
  RowsIn<T> rows{.buffer = buffer, .stride = places.stride, .runs = places.runs};
  if (places.index) rows.index = const_view<int64_t>(*places.index);
  return rows;
}

}  // namespace

RowsIn<const std::byte> const_rows_in(const RowPlaces& places) {
  const auto* const bytes = static_cast<const std::byte*>(places.buffer.const_data_ptr());
  const int64_t count = places.buffer.numel() * places.buffer.element_size();
  return rows_in(places, View<const std::byte>{bytes, {count}});
}

void copy_rows(const std::vector<RowCopy>& copies) {
  std::vector<CopyRowsArgs> args;
  for (const RowCopy& copy : copies)
    args.push_back({.rows = copy.rows,
                    .width = copy.width,
                    .from = const_rows_in(copy.from),
                    .to = rows_in(copy.to, bytes_of(copy.to))});
  if (copies.empty()) return;
  const DeviceScope scope(copies[0].to.buffer.device());
  moxie::copy_rows(args, scope.exec());
}

Messages::Messages(const Part& rows, const Part& pairs)
    : row_width_(rows.width), pair_width_(pairs.width) {
  for (size_t i = 0; i < rows.counts.size(); ++i) {
    rows_.push_back({num_rows_, bytes_});
    const int64_t row_bytes = rows.counts[i] * row_width_;
    pairs_.push_back({num_pairs_, bytes_ + row_bytes});
    sizes_.push_back(row_bytes + pairs.counts[i] * pair_width_);
    bytes_ += sizes_.back();
    num_rows_ += rows.counts[i];
    num_pairs_ += pairs.counts[i];
  }
}

RowPlaces Messages::rows_in(const Tensor& buffer, int64_t column) const {
  RowPlaces places{.buffer = buffer, .stride = row_width_, .runs = rows_};
  for (RowRun& run : places.runs) run.begin += column;
  return places;
}

RowPlaces Messages::pairs_in(const Tensor& buffer) const {
  return {.buffer = buffer, .stride = pair_width_, .runs = pairs_};
}

}  // namespace moxie::ops
