// Ops on tensors of more than 2^31 elements on a GPU. Inputs repeat one block of rows, so the last
// rows of a result must equal the result for that block alone.
#include <gtest/gtest.h>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/groups/groups.h"
#include "moxie/core/permute/permute.h"
#include "moxie/core/permute/permute_quantize.h"
#include "moxie/core/requantize/requantize.h"
#include "moxie/core/row_scale/row_scale.h"
#include "moxie/core/scale_layout/scale_layout.h"
#include "moxie/core/swiglu/swiglu.h"
#include "moxie/core/swiglu/swiglu_quantize.h"
#include "tests/support/arena.h"
#include "tests/support/random.h"

#ifdef MOXIE_CUDA
namespace moxie::testing {
namespace {

const Exec kCuda{.backend = Backend::kCuda};

constexpr int64_t kCols = 7168, kBlockRows = 1024;
constexpr int64_t kBlocks = (int64_t{1} << 31) / (kBlockRows * kCols) + 2;
constexpr int64_t kRows = kBlocks * kBlockRows;
static_assert(kRows * kCols > int64_t{1} << 31);

bool has_memory(size_t bytes) {
  size_t left = 0, total = 0;
  return has_cuda_device() && cudaMemGetInfo(&left, &total) == cudaSuccess && left > bytes;
}

class Large : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_memory(size_t{40} << 30)) GTEST_SKIP() << "needs a GPU with 40 GiB of free memory";
  }
  // Makes a tensor of kRows rows: random values in bf16 (2 bytes per element) or bytes of scales,
  // the same block of rows again and again.
  void* input(int64_t bytes_per_element, int64_t cols = kCols) {
    Random random(static_cast<uint64_t>(bytes_per_element * cols));
    const size_t block = kBlockRows * cols * bytes_per_element;
    std::vector<uint8_t> values(block);
    if (bytes_per_element == 2) {
      const auto numbers = random_values<bf16>(random, kBlockRows * cols, Data::kGaussianLike);
      std::memcpy(values.data(), numbers.data(), block);
    } else {
      for (auto& value : values) value = static_cast<uint8_t>(96 + random.below(40));
    }
    auto* const to = static_cast<uint8_t*>(memory(block * kBlocks));
    copy_to_device(to, values.data(), block);
    for (int64_t done = 1; done < kBlocks; done *= 2)
      check_device("copy", cudaMemcpy(to + done * block, to, min(done, kBlocks - done) * block,
                                      cudaMemcpyDeviceToDevice));
    return to;
  }
  void* memory(size_t bytes) {
    auto& buffer = buffers_.emplace_back(bytes);
    check_device("fill", cudaMemset(buffer.data(), 0xa5, bytes));
    return buffer.data();
  }
  ConstFloatView x(int64_t rows, int64_t cols = kCols) {
    auto& data = cols == kCols ? x_ : wide_;
    if (!data) data = input(2, cols);
    return {data, Format::kBf16, {rows, cols}};
  }
  QuantizedOut operand(Form form, int64_t rows, int64_t cols = kCols,
                       ScaleLayout layout = ScaleLayout::kPlain) {
    const int k = layout == ScaleLayout::kQuads ? kQuadBlock : kMxBlock;
    const Block block = form == Form::kRowwise ? Block{1, k} : Block{k, 1};
    const auto shape = operand_shape<int64_t>({rows, cols}, std::nullopt, form, block, layout);
    return {block,
            layout,
            {static_cast<e4m3*>(memory(numel(shape.qdata))), shape.qdata},
            {static_cast<e8m0*>(memory(numel(shape.scale))), shape.scale}};
  }
  QuantizeForms both(int64_t rows, int64_t cols = kCols, ScaleLayout layout = ScaleLayout::kPlain) {
    return {.rowwise = operand(Form::kRowwise, rows, cols, layout),
            .colwise = operand(Form::kColwise, rows, cols, layout)};
  }

  // Copies the last `width` bytes of each of `lines` lines, which are `pitch` bytes apart.
  static std::vector<uint8_t> ends(const void* data, int64_t lines, int64_t pitch, int64_t width) {
    std::vector<uint8_t> out(lines * width);
    check_device("copy",
                 cudaMemcpy2D(out.data(), width, static_cast<const uint8_t*>(data) + pitch - width,
                              pitch, width, lines, cudaMemcpyDeviceToHost));
    return out;
  }
  // The last kBlockRows rows of a tensor.
  static std::vector<uint8_t> last_rows(const void* data, int64_t rows, int64_t row_bytes) {
    return ends(data, 1, rows * row_bytes, kBlockRows * row_bytes);
  }
  static void expect_same(const QuantizedOut& large, const QuantizedOut& small, Form form) {
    const int64_t rows = kRows,
                  cols = form == Form::kRowwise ? large.qdata.dim(1) : large.qdata.dim(0);
    if (form == Form::kRowwise) {
      EXPECT_EQ(last_rows(large.qdata.data, rows, cols),
                last_rows(small.qdata.data, kBlockRows, cols));
      EXPECT_EQ(last_rows(large.scale.data, rows, cols / 32),
                last_rows(small.scale.data, kBlockRows, cols / 32));
    } else {
      EXPECT_EQ(ends(large.qdata.data, cols, rows, kBlockRows),
                ends(small.qdata.data, cols, kBlockRows, kBlockRows));
      EXPECT_EQ(ends(large.scale.data, cols, rows / 32, kBlockRows / 32),
                ends(small.scale.data, cols, kBlockRows / 32, kBlockRows / 32));
    }
  }
  static void expect_same(const QuantizeForms& large, const QuantizeForms& small) {
    expect_same(*large.rowwise, *small.rowwise, Form::kRowwise);
    expect_same(*large.colwise, *small.colwise, Form::kColwise);
  }
  static void expect_same_values(const FloatView& large, const FloatView& small) {
    const int64_t bytes = large.dim(1) * 2;
    EXPECT_EQ(last_rows(large.data, large.dim(0), bytes),
              last_rows(small.data, small.dim(0), bytes));
  }
  void dequantize_and_requantize(ScaleLayout layout);  // layout: of the scales that both ops read
  FloatView values(int64_t rows, int64_t cols = kCols) {
    return {memory(rows * cols * 2), Format::kBf16, {rows, cols}};
  }
  View<const int32_t> count_up(int64_t count) {
    std::vector<int32_t> index(count);
    for (int64_t i = 0; i < count; ++i) index[i] = static_cast<int32_t>(i);
    void* const data = memory(count * 4);
    copy_to_device(data, index.data(), count * 4);
    return {static_cast<const int32_t*>(data), {count}};
  }

 private:
  std::vector<DeviceBuffer> buffers_;
  void *x_ = nullptr, *wide_ = nullptr;
};

TEST_F(Large, Quantize) {
  const auto large = both(kRows), small = both(kBlockRows);
  quantize(args_of(x(kRows), large), kCuda);
  quantize(args_of(x(kBlockRows), small), kCuda);
  expect_same(large, small);
}

void Large::dequantize_and_requantize(ScaleLayout layout) {
  const auto forms = both(kRows, kCols, layout), few = both(kBlockRows, kCols, layout);
  quantize(args_of(x(kRows), forms), kCuda);
  quantize(args_of(x(kBlockRows), few), kCuda);
  for (const Form form : {Form::kRowwise, Form::kColwise}) {
    const auto decode = [&](const QuantizedOut& from, int64_t rows) {
      const FloatView out = values(rows);
      dequantize({.form = form,
                  .block = from.block,
                  .layout = layout,
                  .qdata = {from.qdata.data, from.qdata.shape},
                  .scale = {from.scale.data, from.scale.shape},
                  .x = out},
                 kCuda);
      return out;
    };
    const bool rowwise = form == Form::kRowwise;
    expect_same_values(decode(rowwise ? *forms.rowwise : *forms.colwise, kRows),
                       decode(rowwise ? *few.rowwise : *few.colwise, kBlockRows));
  }
  const auto turn = [&](const QuantizedOut& from, int64_t rows) {
    const QuantizedOut out = operand(Form::kColwise, rows);
    requantize({.block = from.block,
                .from_layout = layout,
                .qdata = {from.qdata.data, from.qdata.shape},
                .scale = {from.scale.data, from.scale.shape},
                .colwise = out},
               kCuda);
    return out;
  };
  expect_same(turn(*forms.rowwise, kRows), turn(*few.rowwise, kBlockRows), Form::kColwise);
}
TEST_F(Large, DequantizeAndRequantize) { dequantize_and_requantize(ScaleLayout::kPlain); }
TEST_F(Large, DequantizeAndRequantizeSwizzled) {
  dequantize_and_requantize(ScaleLayout::kSwizzled);
}
TEST_F(Large, DequantizeAndRequantizeQuads) { dequantize_and_requantize(ScaleLayout::kQuads); }

// In large tensors a CTA of requantize takes several tiles in a row (a run). Its result must equal
// that of the quantizer's kernel, which requantize uses for unaligned tensors.
TEST_F(Large, RequantizeInRunsMatchesTheQuantizersKernel) {
  constexpr int64_t kTokens = 131072, kWidth = 2064;
  const std::vector<int32_t> group_ends{1, 300, 300, 40000, 40127, 90001, 131000};
  const auto groups = static_cast<int64_t>(group_ends.size());
  auto* const offs = static_cast<int32_t*>(memory(groups * sizeof(int32_t)));
  copy_to_device(offs, group_ends.data(), groups * sizeof(int32_t));
  for (const ScaleLayout layout : {ScaleLayout::kPlain, ScaleLayout::kQuads}) {
    const QuantizedOut from = operand(Form::kRowwise, kTokens, kWidth, layout);
    quantize(args_of(x(kTokens, kWidth), {.rowwise = from}), kCuda);
    const int64_t bytes = numel(from.qdata.shape);
    auto* const shifted = static_cast<e4m3*>(memory(bytes + 1)) + 1;
    check_device("copy", cudaMemcpy(shifted, from.qdata.data, bytes, cudaMemcpyDeviceToDevice));
    const auto requantized = [&](const e4m3* qdata, Block block) {
      const auto shape =
          operand_shape<int64_t>({kTokens, kWidth}, groups, Form::kColwise, block, layout);
      const int64_t elements = numel(shape.qdata), scales = numel(shape.scale);
      const QuantizedOut out{block,
                             layout,
                             {static_cast<e4m3*>(memory(elements)), shape.qdata},
                             {static_cast<e8m0*>(memory(scales)), shape.scale}};
      requantize({.block = from.block,
                  .from_layout = layout,
                  .qdata = {qdata, from.qdata.shape},
                  .scale = {from.scale.data, from.scale.shape},
                  .offs = View<const int32_t>{offs, {groups}},
                  .colwise = out},
                 kCuda);
      return std::pair(ends(out.qdata.data, 1, elements, elements),
                       ends(out.scale.data, 1, scales, scales));
    };
    const int rows = layout == ScaleLayout::kQuads ? kQuadBlock : kMxBlock;
    for (const Block block : {Block{rows, 1}, Block{rows, 32}})
      EXPECT_TRUE(requantized(from.qdata.data, block) == requantized(shifted, block))
          << name(layout) << ' ' << name(block);
  }
}

TEST_F(Large, SwigluAndItsFusions) {
  const auto run = [&](int64_t rows, FloatView& a, QuantizeForms& forms) {
    a = values(rows, kCols / 2);
    swiglu({.h = x(rows), .a = a}, kCuda);
    forms = both(rows, kCols / 2);
    swiglu_quantize({.h = x(rows), .forms = forms}, kCuda);
  };
  FloatView a, few_a;
  QuantizeForms forms, few;
  run(kRows, a, forms), run(kBlockRows, few_a, few);
  expect_same_values(a, few_a);
  expect_same(forms, few);
}

TEST_F(Large, SwigluBackwardAndItsFusion) {
  const auto run = [&](int64_t rows, FloatView& dh, QuantizeForms& forms) {
    const ConstFloatView da = x(rows, kCols / 2), h = x(rows);
    dh = values(rows);
    swiglu_backward({.da = da, .h = h, .dh = dh}, kCuda);
    forms = both(rows);
    swiglu_backward_quantize({.da = da, .h = h, .forms = forms}, kCuda);
  };
  FloatView dh, few_dh;
  QuantizeForms forms, few;
  run(kRows, dh, forms), run(kBlockRows, few_dh, few);
  expect_same_values(dh, few_dh);
  expect_same(forms, few);
}

TEST_F(Large, PermuteUnpermuteAndTheFusion) {
  const auto run = [&](int64_t rows, FloatView& there, FloatView& back, QuantizeForms& forms) {
    const auto index = count_up(rows);
    there = values(rows), back = values(rows), forms = both(rows);
    permute({.x = x(rows), .slot_of = index, .top_k = 1, .rows = there}, kCuda);
    unpermute({.rows = {there.data, there.format, there.shape}, .row_of = index, .x = back}, kCuda);
    permute_quantize({.x = x(rows), .slot_of = index, .top_k = 1, .forms = forms}, kCuda);
  };
  FloatView there, back, few_there, few_back;
  QuantizeForms forms, few;
  run(kRows, there, back, forms), run(kBlockRows, few_there, few_back, few);
  expect_same_values(there, few_there);
  expect_same_values(back, few_back);
  expect_same(forms, few);
}

TEST_F(Large, PadAndSwizzle) {
  const std::vector<int32_t> ends_of_groups = {static_cast<int32_t>(kRows)};
  void* const ends = memory(4);
  copy_to_device(ends, ends_of_groups.data(), 4);
  const View<const int32_t> offs{static_cast<const int32_t*>(ends), {1}};
  const int64_t padded = pad_groups_rows<int64_t>(kRows, 1, 32);
  auto* const out = static_cast<std::byte*>(memory(padded * kCols * 2));
  pad_groups({.x = {static_cast<const std::byte*>(x(kRows).data), {kRows, kCols * 2}},
              .offs = offs,
              .alignment = 32,
              .padded = {out, {padded, kCols * 2}},
              .starts = {static_cast<int32_t*>(memory(4)), {1}},
              .ends = {static_cast<int32_t*>(memory(4)), {1}}},
             kCuda);
  EXPECT_EQ(last_rows(out, kRows, kCols * 2), last_rows(x(kBlockRows).data, kBlockRows, kCols * 2));

  const auto* scale = static_cast<const e8m0*>(input(1));
  const Shape plain{kRows, kCols}, swizzled = swizzled_shape<int64_t>(plain, {}, Form::kRowwise);
  auto* const there = static_cast<e8m0*>(memory(numel(swizzled)));
  auto* const back = static_cast<e8m0*>(memory(numel(plain)));
  swizzle_scale({.plain = {scale, plain}, .swizzled = {there, swizzled}}, kCuda);
  unswizzle_scale({.swizzled = {there, swizzled}, .plain = {back, plain}}, kCuda);
  EXPECT_EQ(last_rows(back, kRows, kCols), last_rows(scale, kBlockRows, kCols));
}

TEST_F(Large, RowScale) {
  const auto run = [&](int64_t rows) {
    const auto shape = row_scale_shape<int64_t>({rows, kCols}, std::nullopt, Form::kRowwise);
    auto* const qdata = static_cast<e4m3*>(memory(numel(shape.qdata)));
    quantize_row_scale(
        {.x = x(rows),
         .offs = std::nullopt,
         .rowwise = RowScaleOut{{qdata, shape.qdata},
                                {static_cast<float*>(memory(rows * 4)), shape.scale}},
         .colwise = std::nullopt},
        kCuda);
    return last_rows(qdata, rows, kCols);
  };
  EXPECT_EQ(run(kRows), run(kBlockRows));
}

}  // namespace
}  // namespace moxie::testing
#endif
