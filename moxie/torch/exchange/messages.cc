#include "moxie/torch/exchange/messages.h"

#include "moxie/torch/exec.h"

namespace moxie::ops {

RowPlaces rows_of_matrix(const Tensor& matrix, const OptionalTensor& index) {
  const Tensor rows = dense(matrix);
  return {.buffer = rows, .stride = rows.size(1) * rows.element_size(), .index = index};
}

void copy_rows(int64_t rows, int64_t width, const RowPlaces& from, const RowPlaces& to) {
  const DeviceScope scope(to.buffer.device());
  const auto bytes = [](const RowPlaces& places) -> Shape {
    return {places.buffer.numel() * places.buffer.element_size()};
  };
  const auto index = [](const RowPlaces& places) -> std::optional<View<const int64_t>> {
    if (!places.index) return std::nullopt;
    return const_view<int64_t>(*places.index);
  };
  const void* const source = from.buffer.const_data_ptr();
  void* const target = to.buffer.mutable_data_ptr();
  moxie::copy_rows({.rows = rows,
                    .width = width,
                    .from = {.buffer = {static_cast<const std::byte*>(source), bytes(from)},
                             .stride = from.stride,
                             .runs = from.runs,
                             .index = index(from)},
                    .to = {.buffer = {static_cast<std::byte*>(target), bytes(to)},
                           .stride = to.stride,
                           .runs = to.runs,
                           .index = index(to)}},
                   scope.exec());
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
