// The plan of a grouped linear in words, for users:
//
//   std::cout << moxie::ops::explain({.recipe = "mxfp8_rceil_128", .n = 2048, .k = 7168});
#pragma once

#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "moxie/torch/plan/plan.h"

namespace moxie::ops {

// The grouped linear to explain: y [rows, n] = x [rows, k] w^T with w [groups, n, k], and its
// gradients.
struct ExplainArgs {
  std::string_view recipe = "mxfp8_rceil_128";
  int64_t n = 0, k = 0;
  c10::Device device = c10::kCPU;
  int64_t rows = 0;
  std::optional<int64_t> groups = std::nullopt;  // the length of offs; absent: no offs, one group
  at::ScalarType x = at::kBFloat16, w = at::kBFloat16;
  bool needs_dx = true, needs_dw = true, main_grad = false;
};

struct ExplainedPass {
  Pass pass;
  std::string kernel;  // "sm90", or "decode, torch._grouped_mm"
  std::string a, b;    // operands: "x e4m3 1x128 quads", or "x bf16"
  std::string reason;  // why it is not an FP8 kernel; empty if it is one
};

struct Explanation {
  std::string recipe;  // every field, as to_text() writes it
  std::array<ExplainedPass, 3> passes;
  int64_t x_bytes = 0, w_bytes = 0;  // kept for backward
};

Explanation explain(const ExplainArgs& args);
std::ostream& operator<<(std::ostream& out, const Explanation& explanation);

}  // namespace moxie::ops
