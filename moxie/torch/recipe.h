// A recipe says how each operand of the three passes is quantized. In text it is the name of a
// preset, optionally with fields that differ from the preset: "mxfp8_rceil_128",
// "mxfp8_rceil:rule=floor,out=float32".
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moxie/core/format/block.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/torch/bits.h"

namespace moxie::ops {

enum class Scaling : uint8_t {
  kNone,  // no quantization: the recipe bf16, and `identity`, which is for gradcheck
  kRow,   // one power-of-two f32 scale per row, or per column of a group
  kBlock,
};

enum class Wgrad : uint8_t { kQuantized, kHighPrecision };

enum class Kernels : uint8_t {
  kAuto,      // the fastest kernels that the device has for the recipe
  kEmulated,  // decode, then the device's bf16 GEMM
};

struct Recipe {
  Scaling scaling = Scaling::kBlock;
  ScaleRule rule = ScaleRule::kRceil;
  Block activations = {1, 32};  // x and dy, contracted over columns
  Block weights = {1, 32};      // w in forward; in dgrad: weights_t()
  Block wgrad_dy = {32, 1};     // dy in wgrad, contracted over rows
  Block wgrad_x = {32, 1};      // x in wgrad, contracted over rows
  Wgrad wgrad = Wgrad::kQuantized;
  Kernels kernels = Kernels::kAuto;
  bool keeps_dtype = false;       // for identity: any dtype, also f64
  bool scales_too_small = false;  // for broken_scales: by a factor of 2
  // Whether the form of w that dgrad reads is made in forward and kept; else backward makes it.
  bool keep_w = true;
  std::optional<at::ScalarType> out = std::nullopt;  // dtype of y; absent: that of x

  bool operator==(const Recipe&) const = default;

  // For pack() and unpack() (bits.h), which turn a recipe into the integer that a graph carries.
  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.scaling, 2);
    f(self.rule, 2);
    f(self.activations);
    f(self.weights);
    f(self.wgrad_dy);
    f(self.wgrad_x);
    f(self.wgrad, 1);
    f(self.kernels, 1);
    f(self.keeps_dtype, 1);
    f(self.scales_too_small, 1);
    f(self.keep_w, 1);
    Out out = out_of(self.out);
    f(out, 2);
    if constexpr (!std::is_const_v<Self>) self.out = dtype_of(out);
  }

  bool quantizes() const { return scaling != Scaling::kNone; }
  bool quantizes_wgrad() const { return quantizes() && wgrad == Wgrad::kQuantized; }
  // The block of w in dgrad, where w is transposed. If it is one row tall, it is transposed too, so
  // that it lies along the contraction; any other block serves both passes.
  Block weights_t() const { return weights.rows == 1 ? Block{weights.cols, 1} : weights; }

  enum class Out : uint8_t { kAsX, kBf16, kF32 };  // the values of `out`, packed

 private:
  static Out out_of(const std::optional<at::ScalarType>& dtype) {
    return !dtype ? Out::kAsX : *dtype == at::kFloat ? Out::kF32 : Out::kBf16;
  }
  static std::optional<at::ScalarType> dtype_of(Out out) {
    if (out == Out::kAsX) return std::nullopt;
    return out == Out::kF32 ? at::kFloat : at::kBFloat16;
  }
};

template <>
inline constexpr uint64_t kNumValues<Scaling> = 3;
template <>
inline constexpr uint64_t kNumValues<Recipe::Out> = 3;

// Throws Error for an unknown name or field and for fields that do not fit together. A public call
// parses its recipe once, where it enters.
Recipe parse_recipe(std::string_view text, std::string_view op);

// The recipe with every field as text, from which parse_recipe() gives the same recipe.
std::string to_text(const Recipe& recipe);

std::vector<std::string> recipe_names();

// How many recipes this process has parsed, for tests.
int64_t recipes_parsed();

}  // namespace moxie::ops
