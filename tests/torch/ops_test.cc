// Tests the ops from C++, in a program without Python.
#include "moxie/torch/ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moxie/torch/view.h"

namespace moxie {
namespace {

using testing::HasSubstr;

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

at::Tensor offs() { return at::tensor({10, 10, 64}, at::kInt); }

TEST(Ops, QuantizeAndDequantizeFromCpp) {
  const at::Tensor x = at::randn({64, 96});
  const auto [qdata, scale] = ops::quantize_rowwise(x);
  EXPECT_EQ(qdata.scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_EQ(scale.scalar_type(), at::kFloat8_e8m0fnu);
  EXPECT_EQ(scale.sizes(), at::IntArrayRef({64, 3}));
  const at::Tensor back = ops::dequantize_rowwise(qdata, scale, {.dtype = at::kFloat});
  // An element is off by at most half a step: 2^-4 of the largest value, as e4m3 has 3 mantissa
  // bits.
  EXPECT_LE((back - x).abs().max().item<float>(), x.abs().max().item<float>() * 0x1p-4f);
}

TEST(Ops, BothFormsEqualTheSeparateForms) {
  const at::Tensor x = at::randn({64, 96}).to(at::kBFloat16);
  const auto [qdata, scale, qdata_t, scale_t] = ops::quantize_both(
      x, {.offs = offs(), .rowwise_block = "1x128", .colwise_block = "128x32", .rule = "floor"});
  const auto [qdata_1, scale_1] =
      ops::quantize_rowwise(x, {.offs = offs(), .block = "1x128", .rule = "floor"});
  const auto [qdata_2, scale_2] =
      ops::quantize_colwise(x, {.offs = offs(), .block = "128x32", .rule = "floor"});
  EXPECT_TRUE(same_bytes(qdata, qdata_1) && same_bytes(scale, scale_1));
  EXPECT_TRUE(same_bytes(qdata_t, qdata_2) && same_bytes(scale_t, scale_2));
  const at::Tensor back =
      ops::dequantize_colwise(qdata_t, scale_t, 64, {.offs = offs(), .block = "128x32"});
  EXPECT_EQ(back.scalar_type(), at::kBFloat16);
  EXPECT_EQ(back.sizes(), x.sizes());
}

TEST(Ops, RequantizeIsDequantizeThenQuantize) {
  const auto [qdata, scale] = ops::quantize_rowwise(at::randn({3, 64, 96}));
  const auto [qdata_t, scale_t] = ops::requantize(qdata, scale);
  const auto [expected, expected_scale] =
      ops::quantize_colwise(ops::dequantize_rowwise(qdata, scale, {.dtype = at::kFloat}));
  EXPECT_TRUE(same_bytes(qdata_t, expected) && same_bytes(scale_t, expected_scale));
}

TEST(Ops, ReadsSwizzledScalesWhoseShapeEqualsThePlainOne) {
  const at::Tensor x = at::randn({256, 128});
  const auto [qdata, plain, qdata_t, plain_t] = ops::quantize_both(x);
  const auto [qdata_1, scale, qdata_t_1, scale_t] =
      ops::quantize_both(x, {.scale_layout = "swizzled"});
  ASSERT_EQ(scale.sizes(), plain.sizes());
  ASSERT_EQ(scale_t.sizes(), plain_t.sizes());
  EXPECT_TRUE(same_bytes(ops::dequantize_rowwise(qdata, scale, {.scale_layout = "swizzled"}),
                         ops::dequantize_rowwise(qdata, plain)));
  EXPECT_TRUE(
      same_bytes(ops::dequantize_colwise(qdata_t, scale_t, 256, {.scale_layout = "swizzled"}),
                 ops::dequantize_colwise(qdata_t, plain_t, 256)));
  const auto [actual, actual_scale] = ops::requantize(
      qdata, scale, {.colwise_block = "128x32", .rule = "floor", .from_layout = "swizzled"});
  const auto [expected, expected_scale] =
      ops::requantize(qdata, plain, {.colwise_block = "128x32", .rule = "floor"});
  EXPECT_TRUE(same_bytes(actual, expected) && same_bytes(actual_scale, expected_scale));
}

TEST(Ops, ScalesGoThereAndBack) {
  const auto [qdata, scale] = ops::quantize_rowwise(at::randn({2, 256, 512}), {.block = "128x128"});
  const at::Tensor plain = ops::replicate_scale(scale, 256, 512, "128x128");
  EXPECT_TRUE(same_bytes(ops::compact_scale(plain, "128x128"), scale));
  const at::Tensor swizzled = ops::swizzle_scale(plain);
  EXPECT_EQ(swizzled.sizes(), at::IntArrayRef({2, 256 * 16}));
  EXPECT_TRUE(same_bytes(ops::unswizzle_scale(swizzled, 256, 16), plain));
}

TEST(Ops, PadAndUnpadCarryGradients) {
  const at::Tensor x = at::randn({64, 8}).requires_grad_();
  const auto [padded, starts, ends] = ops::pad_groups(x, offs(), 32);
  EXPECT_TRUE(at::equal(ends, ops::padded_offs(offs(), 32)));
  const at::Tensor back = ops::unpad_groups(padded, offs(), starts, 64);
  EXPECT_TRUE(at::equal(back, x));
  (back * back).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * x.detach()));
}

TEST(Ops, PerRowScalesArePowersOfTwo) {
  const at::Tensor x = at::randn({64, 96});
  const auto [qdata, scale] = ops::quantize_per_row(x);
  const auto [qdata_t, scale_t] = ops::quantize_per_col(x, offs());
  EXPECT_EQ(scale_t.sizes(), at::IntArrayRef({3, 96}));
  EXPECT_TRUE(at::equal(scale.log2(), scale.log2().round()));
}

TEST(Ops, AnErrorIsTorchsValueErrorUnderTheNameOfTheOp) {
  const at::Tensor x = at::randn({64, 96});
  try {
    ops::quantize_colwise(x, {.offs = at::tensor({30, 20}, at::kInt)});
    FAIL() << "offs that decrease were accepted";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.msg(), HasSubstr("quantize_colwise: offs must not decrease"));
  }
}

TEST(Ops, AGpuThatFailsIsARuntimeErrorUnderTheNameOfTheOp) {
  try {
    ops::with_op("grouped_mm",
                 []() -> int { throw DeviceError("quantize: a launch failed: out of memory"); });
    FAIL() << "it went by in silence";
  } catch (const c10::ValueError&) {
    FAIL() << "the arguments were right";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.msg(), HasSubstr("grouped_mm: a launch failed: out of memory"));
  }
}

}  // namespace
}  // namespace moxie
