// The messages of one leg, as bytes in one buffer: for each rank its rows, then what belongs to its
// pairs (core/layout/wire.h).
#pragma once

#include <vector>

#include "moxie/core/copy_rows/copy_rows.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// Rows in a buffer of bytes, as copy_rows() takes them.
struct RowPlaces {
  Tensor buffer;  // contiguous, of any dtype
  int64_t stride;
  std::vector<RowRun> runs = {{}};
  OptionalTensor index = std::nullopt;  // int64 [rows]
};

// The rows of a matrix, or those that `index` names.
RowPlaces rows_of_matrix(const Tensor& matrix, const OptionalTensor& index = {});

// The same for core.
RowsIn<const std::byte> const_rows_in(const RowPlaces& places);

// The first `width` bytes of each row.
struct RowCopy {
  int64_t rows, width;
  RowPlaces from, to;
};
// On a GPU in one launch, and it does not wait.
void copy_rows(const std::vector<RowCopy>& copies);

class Messages {
 public:
  // One half of the messages.
  struct Part {
    const std::vector<int64_t>& counts;  // of each rank
    int64_t width;                       // bytes of a row; 0: there is no such half
  };
  Messages(const Part& rows, const Part& pairs);

  const std::vector<int64_t>& sizes() const { return sizes_; }  // bytes of each rank's message
  int64_t bytes() const { return bytes_; }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_pairs() const { return num_pairs_; }
  // Where rows and pairs are in `buffer`, from byte `column` of a row on.
  RowPlaces rows_in(const Tensor& buffer, int64_t column = 0) const;
  RowPlaces pairs_in(const Tensor& buffer) const;
  // Whether nothing lies between the rows of two ranks.
  bool rows_are_adjacent() const { return pair_width_ == 0 || sizes_.size() == 1; }

 private:
  int64_t row_width_, pair_width_;
  int64_t bytes_ = 0, num_rows_ = 0, num_pairs_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<RowRun> rows_, pairs_;
};

}  // namespace moxie::ops
