// An op fused with quantize gives the same bytes as the two separate ops, on every backend.
#include <gtest/gtest.h>

#include <numeric>
#include <sstream>
#include <utility>

#include "moxie/core/permute/permute.h"
#include "moxie/core/permute/permute_quantize.h"
#include "moxie/core/swiglu/swiglu.h"
#include "moxie/core/swiglu/swiglu_quantize.h"
#include "tests/support/backends.h"
#include "tests/support/input.h"

namespace moxie::testing {
namespace {

using Bytes = std::vector<std::vector<uint8_t>>;

constexpr int kCases = 150;

Block random_block(Random& random, Form form, bool grouped) {
  for (;;) {
    const Block block = kBlocks[random.below(std::size(kBlocks))];
    if (is_operand_block(block, form) && !(form == Form::kRowwise && block.rows > 1 && grouped))
      return block;
  }
}

// Random arguments of a quantizer of x [rows, cols]: which forms, in which blocks and layouts.
struct Request {
  Shape x;
  std::vector<int32_t> offs;  // empty: no offs
  int misalign;
  bool rowwise, colwise;
  Block row_block, col_block;
  ScaleLayout layout;
  ScaleRule rule;

  Request(Random& random, int64_t rows, int64_t cols) : x(rows, cols) {
    if (random.chance(75))
      offs = random_offs(random, rows, random.pick<int64_t>({1, 2, 3, 8, 33, 300}));
    misalign = random.chance(60) ? 0 : static_cast<int>(random.between(1, 7));
    const int64_t which = random.below(4);  // both forms in half of the cases, as in training
    rowwise = which != 1, colwise = which != 0;
    row_block = random_block(random, Form::kRowwise, !offs.empty());
    col_block = random_block(random, Form::kColwise, !offs.empty());
    layout = random.chance(60) ? ScaleLayout::kPlain : ScaleLayout::kSwizzled;
    if (row_block.cols == kQuadBlock && col_block.rows == kQuadBlock && random.chance(70))
      layout = ScaleLayout::kQuads;
    rule = random.pick({ScaleRule::kRceil, ScaleRule::kFloor, ScaleRule::kCeil, ScaleRule::kEven});
  }

  QuantizeForms forms(Arena& arena) const {
    QuantizeForms forms{.rule = rule};
    std::optional<int64_t> groups;
    if (!offs.empty()) {
      groups = static_cast<int64_t>(offs.size());
      forms.offs = arena.input(offs, {*groups});
    }
    const auto operand = [&](Form form, Block block) -> QuantizedOut {
      const auto shape = operand_shape<int64_t>(x, groups, form, block, layout);
      return {block, layout, arena.output<e4m3>(shape.qdata), arena.output<e8m0>(shape.scale)};
    };
    if (rowwise) forms.rowwise = operand(Form::kRowwise, row_block);
    if (colwise) forms.colwise = operand(Form::kColwise, col_block);
    return forms;
  }
  std::string text() const {
    std::ostringstream out;
    out << x << " groups " << offs.size() << " misalign " << misalign << ' ' << name(rule)
        << (rowwise ? " rowwise " + name(row_block) : "")
        << (colwise ? " colwise " + name(col_block) : "") << ' ' << name(layout);
    return out.str();
  }
};

// The tensor between two unfused ops, in memory of the backend.
struct Between {
  Arena arena;
  FloatView view;

  Between(Backend backend, Format format, const Shape& shape, int misalign)
      : arena(backend, misalign), view(arena.float_output(format, shape)) {}
  ConstFloatView in() const { return {view.data, view.format, view.shape}; }
};

// Expects the fused op to give the bytes of the separate ops on each backend; with `equals_ref`,
// also the bytes of the reference. The separate ops also compute rows past the last group, which
// the fused op skips: those values must not affect the quantized result.
template <class Fused, class Apart>
void expect_equal(const std::string& text, const Fused& fused, const Apart& apart,
                  bool equals_ref) {
  auto backends = backends_here();
  backends.push_back({"ref", {.backend = Backend::kRef}});
  const Bytes reference = apart(Exec{.backend = Backend::kRef});
  for (const auto& backend : backends) {
    const Bytes expected = apart(backend.exec);
    EXPECT_TRUE(fused(backend.exec) == expected) << backend.name << ' ' << text;
    EXPECT_TRUE(!equals_ref || expected == reference) << backend.name << ' ' << text;
  }
}

// Routing weights for `rows` rows, with slot_of in random order; half of the time without weights.
struct Weights {
  std::vector<float> weights;
  std::vector<int32_t> slot_of;

  Weights(Random& random, int64_t rows) {
    if (random.chance(50)) return;
    for (int64_t r = 0; r < rows; ++r) {
      weights.push_back(static_cast<float>(random.between(-64, 64)) / 32);
      slot_of.push_back(static_cast<int32_t>(r));
    }
    for (int64_t r = rows - 1; r > 0; --r) std::swap(slot_of[r], slot_of[random.between(0, r)]);
  }
  std::optional<RowWeights> in(Arena& arena) const {
    const auto rows = static_cast<int64_t>(weights.size());
    if (rows == 0) return std::nullopt;
    return RowWeights{arena.input(weights, {rows}), arena.input(slot_of, {rows})};
  }
  std::optional<WeightGradient> gradient(Arena& arena, Arena& workspace, int64_t width) const {
    const auto of = in(arena);
    if (!of) return std::nullopt;
    const int64_t rows = of->slot_of.dim(0);
    return WeightGradient{*of, arena.output<float>({rows}),
                          workspace.output<float>({rows, weight_gradient_tiles(width)})};
  }
};

Activation random_activation(Random& random) {
  return random.chance(50) ? Activation::kSwiglu : Activation::kClampedSwiglu;
}

int64_t random_width(Random& random) {
  return random.pick<int64_t>({0, 1, 8, 31, 32, 64, 100, 128, 128, 136, 256, 384, 528, 640});
}

TEST(Fused, SwigluQuantizeIsSwigluThenQuantize) {
  for (int number = 0; number < kCases; ++number) {
    Random random(number);
    const int64_t rows = random.between(0, 300), width = random_width(random);
    const Request request(random, rows, width);
    const Input h(random, rows * 2 * width, random_data(random));
    const Weights weights(random, rows);
    const Activation activation = random_activation(random);
    const auto fused = [&](const Exec& exec) {
      Arena arena(exec.backend, request.misalign);
      swiglu_quantize({.h = h.in(arena, {rows, 2 * width}),
                       .forms = request.forms(arena),
                       .weights = weights.in(arena),
                       .activation = activation},
                      exec);
      return arena.results();
    };
    const auto apart = [&](const Exec& exec) {
      Arena arena(exec.backend, request.misalign);
      const Between a(exec.backend, h.format, request.x, request.misalign);
      swiglu({.h = h.in(arena, {rows, 2 * width}),
              .a = a.view,
              .weights = weights.in(arena),
              .activation = activation},
             exec);
      quantize(args_of(a.in(), request.forms(arena)), exec);
      return arena.results();
    };
    expect_equal(request.text() + ' ' + name(h.format) + ' ' + name(activation), fused, apart,
                 false);
    if (HasFailure()) return;
  }
}

TEST(Fused, SwigluBackwardQuantizeIsSwigluBackwardThenQuantize) {
  for (int number = 0; number < kCases; ++number) {
    Random random(number);
    const int64_t rows = random.between(0, 300), width = random_width(random);
    const Request request(random, rows, 2 * width);
    const Input h(random, rows * 2 * width, random_data(random));
    Input da(random, rows * width, random_data(random));
    while (da.format != h.format) da = Input(random, rows * width, Data::kGaussianLike);
    const Weights weights(random, rows);
    const Activation activation = random_activation(random);
    const auto fused = [&](const Exec& exec) {
      Arena forms(exec.backend, request.misalign), arena(exec.backend, request.misalign),
          workspace(exec.backend);
      swiglu_backward_quantize({.da = da.in(arena, {rows, width}),
                                .h = h.in(arena, request.x),
                                .forms = request.forms(forms),
                                .weights = weights.gradient(arena, workspace, width),
                                .activation = activation},
                               exec);
      Bytes bytes = forms.results();
      for (const auto& dots : arena.results()) bytes.push_back(dots);  // one, if there are weights
      return bytes;
    };
    const auto apart = [&](const Exec& exec) {
      Arena forms(exec.backend, request.misalign), arena(exec.backend, request.misalign),
          workspace(exec.backend);
      const Between dh(exec.backend, h.format, request.x, request.misalign);
      swiglu_backward({.da = da.in(arena, {rows, width}),
                       .h = h.in(arena, request.x),
                       .dh = dh.view,
                       .weights = weights.gradient(arena, workspace, width),
                       .activation = activation},
                      exec);
      quantize(args_of(dh.in(), request.forms(forms)), exec);
      Bytes bytes = forms.results();
      for (auto dots : arena.results()) {
        for (int64_t r = request.offs.empty() ? rows : request.offs.back(); r < rows; ++r)
          std::memset(&dots[weights.slot_of[r] * sizeof(float)], 0, sizeof(float));
        bytes.push_back(dots);
      }
      return bytes;
    };
    expect_equal(request.text() + ' ' + name(h.format) + ' ' + name(activation), fused, apart,
                 false);
    if (HasFailure()) return;
  }
}

TEST(Fused, PermuteQuantizeIsPermuteThenQuantize) {
  for (int number = 0; number < kCases; ++number) {
    Random random(number);
    const int64_t tokens = random.between(0, 120), k = random.between(1, 8), rows = tokens * k;
    const int64_t dim = random_width(random);
    const Request request(random, rows, dim);
    const Input x(random, tokens * dim, random_data(random));
    // With row_of, slots are a permutation; without, any slots.
    std::vector<int32_t> slot_of(rows), row_of(rows);
    std::iota(slot_of.begin(), slot_of.end(), 0);
    const bool has_inverse = random.chance(60);
    for (int64_t i = rows - 1; i > 0 && has_inverse; --i)
      std::swap(slot_of[i], slot_of[random.below(i + 1)]);
    for (int64_t i = 0; i < rows; ++i) row_of[slot_of[i]] = static_cast<int32_t>(i);
    if (!has_inverse)
      for (auto& slot : slot_of) slot = static_cast<int32_t>(random.below(rows));
    const auto fused = [&](const Exec& exec) {
      Arena arena(exec.backend, request.misalign);
      std::optional<View<const int32_t>> inverse;
      if (has_inverse) inverse = arena.input(row_of, {rows});
      permute_quantize({.x = x.in(arena, {tokens, dim}),
                        .slot_of = arena.input(slot_of, {rows}),
                        .top_k = k,
                        .row_of = inverse,
                        .forms = request.forms(arena)},
                       exec);
      return arena.results();
    };
    const auto apart = [&](const Exec& exec) {
      Arena arena(exec.backend, request.misalign);
      const Between between(exec.backend, x.format, request.x, request.misalign);
      permute({.x = x.in(arena, {tokens, dim}),
               .slot_of = arena.input(slot_of, {rows}),
               .top_k = k,
               .rows = between.view},
              exec);
      quantize(args_of(between.in(), request.forms(arena)), exec);
      return arena.results();
    };
    expect_equal(request.text() + " k " + std::to_string(k) + ' ' + name(x.format), fused, apart,
                 true);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace moxie::testing
