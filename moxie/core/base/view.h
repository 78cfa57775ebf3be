// A view is a pointer and a shape: contiguous, row-major, not owning.
#pragma once

#include <array>
#include <cstdint>
#include <ostream>

namespace moxie {

// Up to three sizes. Int is int64_t, or torch's symbolic integer where torch traces shapes.
template <class Int>
struct BasicShape {
  int dims = 0;
  std::array<Int, 3> size{};

  constexpr BasicShape() = default;
  constexpr BasicShape(Int a) : dims(1), size{a, Int(1), Int(1)} {}  // NOLINT: a size is a shape
  constexpr BasicShape(Int a, Int b) : dims(2), size{a, b, Int(1)} {}
  constexpr BasicShape(Int a, Int b, Int c) : dims(3), size{a, b, c} {}

  constexpr const Int& operator[](int i) const { return size[i]; }
  // dim(-1) is the last size, dim(-2) the one before it.
  constexpr const Int& dim(int i) const { return size[i < 0 ? dims + i : i]; }
  constexpr bool operator==(const BasicShape&) const = default;
};

using Shape = BasicShape<int64_t>;

constexpr int64_t numel(const Shape& shape) {
  int64_t count = 1;
  for (int i = 0; i < shape.dims; ++i) count *= shape[i];
  return count;
}

inline std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.dims; ++i) out << (i ? ", " : "") << shape[i];
  return out << ']';
}

template <class T>
struct View {
  T* data = nullptr;
  Shape shape;

  constexpr int64_t dim(int i) const { return shape.dim(i); }
};

enum class Format : uint8_t { kBf16, kF32 };

constexpr const char* name(Format format) { return format == Format::kBf16 ? "bf16" : "f32"; }
constexpr int64_t bytes_of(Format format) { return format == Format::kBf16 ? 2 : 4; }

// A tensor in one of the two high-precision formats, bf16 and f32.
template <class Void>
struct BasicFloatView {
  Void* data = nullptr;
  Format format = Format::kBf16;
  Shape shape;

  constexpr int64_t dim(int i) const { return shape.dim(i); }
};

using FloatView = BasicFloatView<void>;
using ConstFloatView = BasicFloatView<const void>;

}  // namespace moxie
