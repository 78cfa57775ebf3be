// Packs a struct of small fields into one integer, which a graph carries in place of text. The
// integer is the same in every process.
//
// A struct lists its fields once, for both directions, each with its number of bits:
//
//   template <class Self, class F> static void fields(Self& self, F&& f) { f(self.rule, 2); ... }
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "moxie/core/format/block.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie::ops {

inline constexpr int kBlockBits = 3;  // an index into kBlocks
static_assert(std::size(kBlocks) <= size_t{1} << kBlockBits);

// The number of values of an enum: unpack() refuses values beyond it. 0 means that every bit
// pattern is a value.
template <class T>
inline constexpr uint64_t kNumValues = 0;
template <>
inline constexpr uint64_t kNumValues<ScaleLayout> = 3;

class BitWriter {
 public:
  template <class T>
  void operator()(const T& value, int bits) {
    put(static_cast<uint64_t>(value), bits);
  }
  void operator()(const Block& block) {
    for (size_t i = 0; i < std::size(kBlocks); ++i)
      if (kBlocks[i] == block) return put(i, kBlockBits);
    TORCH_INTERNAL_ASSERT(false, "no such block: ", name(block));
  }
  void operator()(const std::optional<Block>& block) {
    put(block.has_value(), 1);
    (*this)(block.value_or(kBlocks[0]));
  }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  void put(uint64_t value, int bits) {
    TORCH_INTERNAL_ASSERT(value < uint64_t{1} << bits && at_ + bits < 63);
    value_ |= value << at_;
    at_ += bits;
  }
  uint64_t value_ = 0;
  int at_ = 0;
};

class BitReader {
 public:
  explicit BitReader(int64_t value) : value_(static_cast<uint64_t>(value)) {}

  template <class T>
  void operator()(T& value, int bits) {
    const uint64_t field = take(bits);
    is_right_ &= kNumValues<T> == 0 || field < kNumValues<T>;
    value = static_cast<T>(field);
  }
  void operator()(Block& block) {
    const uint64_t index = take(kBlockBits);
    is_right_ &= index < std::size(kBlocks);
    block = kBlocks[index % std::size(kBlocks)];
  }
  void operator()(std::optional<Block>& block) {
    const bool present = take(1) != 0;
    Block of;
    (*this)(of);
    block = present ? std::optional(of) : std::nullopt;
  }
  // Whether every field had a valid value and no bits are left after the last field.
  bool is_right() const { return is_right_ && value_ == 0; }

 private:
  uint64_t take(int bits) {
    const uint64_t field = value_ & ((uint64_t{1} << bits) - 1);
    value_ >>= bits;
    return field;
  }
  uint64_t value_;
  bool is_right_ = true;
};

template <class Struct>
int64_t pack(const Struct& from) {
  BitWriter writer;
  Struct::fields(from, writer);
  return writer.value();
}

template <class Struct>
Struct unpack(int64_t value, const char* op) {
  Struct to;
  BitReader reader(value);
  Struct::fields(to, reader);
  TORCH_CHECK_VALUE(reader.is_right(), op,
                    ": a spec or plan must be an integer that pack() made, got ", value);
  return to;
}

}  // namespace moxie::ops
