// dequantize gives the same result for scales in any layout, on every backend of this machine.
#include "moxie/core/dequantize/dequantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "moxie/core/base/check.h"
#include "moxie/core/requantize/requantize.h"
#include "tests/support/every_layout.h"

namespace moxie::testing {
namespace {

class DequantizeOn : public ReadsEveryLayout {
 protected:
  Bytes dequantized(const LayoutProblem& problem, Form form, Block block, ScaleLayout layout,
                    Format format) const {
    const Quantized from = quantized(problem, form, block, layout);
    Arena arena(exec().backend);
    DequantizeArgs args{.form = form,
                        .block = block,
                        .layout = layout,
                        .qdata = arena.input(from.qdata, from.qdata_shape),
                        .scale = arena.input(from.scale, from.scale_shape)};
    if (!problem.offs.empty())
      args.offs = arena.input(problem.offs, {static_cast<int64_t>(problem.offs.size())});
    args.x = arena.float_output(format, problem.x);
    dequantize(args, exec());
    return arena.results();
  }
};

INSTANTIATE_TEST_SUITE_P(, DequantizeOn, ::testing::ValuesIn(ref_and_backends_here()),
                         [](const auto& info) { return info.param.name; });

TEST_P(DequantizeOn, ReadsEveryLayoutAsPlainScales) {
  for (const LayoutProblem& problem : kLayoutProblems)
    for (const Form form : {Form::kRowwise, Form::kColwise})
      for (const Block block : blocks(form, problem))
        for (const ScaleLayout layout : layouts(form, block))
          for (const Format format : {Format::kBf16, Format::kF32})
            EXPECT_EQ(dequantized(problem, form, block, layout, format),
                      dequantized(problem, form, block, kPlain, format))
                << problem.name << ' ' << name(form) << ' ' << name(block) << ' ' << name(layout)
                << ' ' << name(format);
}

TEST(SwizzledScales, MustHaveTheShapeOfTheirLayout) {
  const Shape x{70, 96};
  const std::vector<float> values(numel(x), 1);
  const auto plain = quantize_form(values, x, Form::kRowwise, {1, 32}, {70});
  const View<const e4m3> qdata{plain.qdata.data(), plain.qdata_shape};
  const View<const e8m0> scale{plain.scale.data(), plain.scale_shape};
  const std::vector<int32_t> offs{70};
  std::vector<float> out(numel(x));
  Quantized colwise(x, 1, Form::kColwise, {32, 1});
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const Exec ref{.backend = Backend::kRef};
  EXPECT_EQ(message([&] {
              dequantize({.block = {1, 32},
                          .layout = kSwizzled,
                          .qdata = qdata,
                          .scale = scale,
                          .offs = view_of(offs),
                          .x = {out.data(), Format::kF32, x}},
                         ref);
            }),
            "dequantize: scale must be [198, 4], got [70, 3]");
  EXPECT_EQ(message([&] {
              requantize({.block = {1, 32},
                          .from_layout = kSwizzled,
                          .qdata = qdata,
                          .scale = scale,
                          .offs = view_of(offs),
                          .colwise = colwise.operand()},
                         ref);
            }),
            "requantize: scale must be [198, 4], got [70, 3]");
}

TEST(Dequantize, OfQuantizedPowersOfTwoIsExactInBothForms) {
  const Shape shape{70, 66};
  std::vector<float> x(numel(shape));
  for (int64_t i = 0; i < numel(shape); ++i)
    x[i] = std::ldexp(i % 2 ? 1.f : -1.f, static_cast<int>(i % 7));
  const std::vector<int32_t> offs{1, 33, 70};
  for (const Form form : {Form::kRowwise, Form::kColwise}) {
    const Block block = form == Form::kRowwise ? Block{1, 32} : Block{32, 32};
    const auto q = quantize_form(x, shape, form, block, offs);
    std::vector<float> back(numel(shape), NAN);
    dequantize({.form = form,
                .block = block,
                .qdata = {q.qdata.data(), q.qdata_shape},
                .scale = {q.scale.data(), q.scale_shape},
                .offs = view_of(offs),
                .x = {back.data(), Format::kF32, shape}},
               {.backend = Backend::kRef});
    EXPECT_EQ(back, x);
  }
}

}  // namespace
}  // namespace moxie::testing
