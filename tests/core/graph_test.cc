// Ops must work from the offs in GPU memory: replayed CUDA graphs use offs that changed since the
// capture, and malformed offs give defined results.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/groups/groups.h"
#include "moxie/core/permute/permute_quantize.h"
#include "moxie/core/requantize/requantize.h"
#include "moxie/core/row_scale/row_scale.h"
#include "moxie/core/swiglu/swiglu_quantize.h"
#include "tests/support/arena.h"
#include "tests/support/random.h"

#ifdef MOXIE_CUDA
namespace moxie::testing {
namespace {

const Exec kCuda{.backend = Backend::kCuda};

constexpr int64_t kGraphRows = 300, kGraphCols = 256;

// Prepare allocates an op's tensors in an arena and returns the call that launches the op, because
// nothing may be allocated while a graph is captured.
using Launch = std::function<void(const Exec& exec)>;
using Prepare = std::function<Launch(Arena& arena, const View<const int32_t>& offs)>;

void expect_replay(const Prepare& prepare) {
  const std::vector<std::vector<int32_t>> contents = {
      {10, 10, 150, 300}, {0, 0, 300, 300}, {300, 300, 300, 300}, {1, 129, 200, 257}};
  Arena captured(Backend::kCuda);
  const auto offs = captured.input(contents[0], {4});
  const Launch run = prepare(captured, offs);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check_device("stream", cudaStreamCreate(&stream));
  // During a capture any call that waits for the device is an error, so this shows that ops do not.
  check_device("begin", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run({.backend = Backend::kCuda, .stream = stream});
  check_device("end", cudaStreamEndCapture(stream, &graph));
  check_device("instantiate", cudaGraphInstantiate(&executable, graph, 0));
  for (const auto& ends : contents) {
    copy_to_device(const_cast<int32_t*>(offs.data), ends.data(), 16);
    check_device("launch", cudaGraphLaunch(executable, stream));
    check_device("wait", cudaStreamSynchronize(stream));
    Arena fresh(Backend::kCuda);
    prepare(fresh, fresh.input(ends, {4}))(kCuda);
    EXPECT_EQ(captured.results(), fresh.results());
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The valid ends that kernels must use in place of malformed ones (decreasing, negative or past the
// last row). expect_rising_ends() tries up to 32 groups and more, because up to 32 one warp
// searches for a CTA's rows, and with more all threads do, unless ends decrease.
std::vector<int32_t> rising(std::vector<int32_t> ends) {
  int32_t most = 0;
  for (int32_t& end : ends) end = most = std::clamp<int32_t>(end, most, kGraphRows);
  return ends;
}

void expect_rising_ends(const Prepare& prepare) {
  for (const int64_t groups : {5, 32, 33, 100, 256, 257, 700, 1024}) {
    std::vector<int32_t> ends(groups);
    for (int64_t i = 0; i < groups; ++i)
      ends[i] = static_cast<int32_t>((i + 1) * (kGraphRows - 7) / groups);
    const auto run = [&](const std::vector<int32_t>& offs) {
      Arena arena(Backend::kCuda);
      prepare(arena, arena.input(offs, {groups}))(kCuda);
      return arena.results();
    };
    const auto expect_with = [&](int64_t first, int64_t last, int32_t wrong) {
      auto offs = ends;
      std::fill(offs.begin() + first, offs.begin() + last, wrong);
      EXPECT_EQ(run(offs), run(rising(offs)))
          << groups << " groups, " << wrong << " from " << first << " to " << last;
    };
    const int64_t some = groups / 4 + 1, middle = groups / 2;
    for (const int32_t below : {-5, std::numeric_limits<int32_t>::min()})
      expect_with(0, some, below);
    for (const int32_t above : {static_cast<int32_t>(kGraphRows) + 40, 1 << 30})
      expect_with(groups - some, groups, above);
    for (const int32_t wrong : {-5, 20, 1 << 30}) expect_with(middle, middle + 1, wrong);
  }
}

ConstFloatView random_input(Arena& arena, int64_t cols) {
  Random random(static_cast<uint64_t>(cols));
  const auto numbers = random_values<bf16>(random, kGraphRows * cols, Data::kGaussianLike);
  return {arena.input(numbers, {kGraphRows, cols}).data, Format::kBf16, {kGraphRows, cols}};
}

QuantizeForms forms_for(Arena& arena, int64_t cols, const View<const int32_t>& offs,
                        ScaleLayout layout = ScaleLayout::kPlain) {
  const auto operand = [&](Form form, Block block) -> QuantizedOut {
    const auto shape = operand_shape<int64_t>({kGraphRows, cols}, offs.dim(0), form, block, layout);
    return {block, layout, arena.output<e4m3>(shape.qdata), arena.output<e8m0>(shape.scale)};
  };
  const int k = layout == ScaleLayout::kQuads ? kQuadBlock : kMxBlock;
  return {.offs = offs,
          .rowwise = operand(Form::kRowwise, {1, k}),
          .colwise = operand(Form::kColwise, {k, 1})};
}

Prepare quantize_and_back(ScaleLayout layout) {
  return [layout](Arena& arena, const View<const int32_t>& offs) -> Launch {
    const auto x = random_input(arena, kGraphCols);
    const auto forms = forms_for(arena, kGraphCols, offs, layout),
               again = forms_for(arena, kGraphCols, offs, layout);
    const auto out = arena.float_output(Format::kBf16, x.shape);
    return [=](const Exec& exec) {
      quantize(args_of(x, forms), exec);
      quantize(args_of(x, again), exec);
      const QuantizedOut &from = *forms.rowwise, &turned = *forms.colwise;
      requantize({.block = from.block,
                  .from_layout = layout,
                  .qdata = {from.qdata.data, from.qdata.shape},
                  .scale = {from.scale.data, from.scale.shape},
                  .offs = offs,
                  .colwise = *again.colwise},
                 exec);
      dequantize({.form = Form::kColwise,
                  .block = turned.block,
                  .layout = layout,
                  .qdata = {turned.qdata.data, turned.qdata.shape},
                  .scale = {turned.scale.data, turned.scale.shape},
                  .offs = offs,
                  .x = out},
                 exec);
    };
  };
}

Prepare fused_ops() {
  return [](Arena& arena, const View<const int32_t>& offs) -> Launch {
    const auto h = random_input(arena, 2 * kGraphCols), da = random_input(arena, kGraphCols);
    std::vector<int32_t> slots(kGraphRows);
    for (int64_t i = 0; i < kGraphRows; ++i) slots[i] = static_cast<int32_t>(kGraphRows - 1 - i);
    const auto slot_of = arena.input(slots, {kGraphRows});
    const auto a = forms_for(arena, kGraphCols, offs), dh = forms_for(arena, 2 * kGraphCols, offs),
               rows = forms_for(arena, kGraphCols, offs);
    return [=](const Exec& exec) {
      swiglu_quantize({.h = h, .forms = a}, exec);
      swiglu_backward_quantize({.da = da, .h = h, .forms = dh}, exec);
      permute_quantize({.x = da, .slot_of = slot_of, .top_k = 1, .forms = rows}, exec);
    };
  };
}

Prepare pad_and_row_scale() {
  return [](Arena& arena, const View<const int32_t>& offs) -> Launch {
    const auto x = random_input(arena, kGraphCols);
    const int64_t groups = offs.dim(0), padded = pad_groups_rows(kGraphRows, groups, int64_t{32});
    const PadGroupsArgs pad{
        .x = {static_cast<const std::byte*>(x.data), {kGraphRows, kGraphCols * 2}},
        .offs = offs,
        .alignment = 32,
        .padded = arena.output<std::byte>({padded, kGraphCols * 2}),
        .starts = arena.output<int32_t>({groups}),
        .ends = arena.output<int32_t>({groups})};
    const auto operand = [&](Form form) -> RowScaleOut {
      const auto shape = row_scale_shape<int64_t>(x.shape, groups, form);
      return {arena.output<e4m3>(shape.qdata), arena.output<float>(shape.scale)};
    };
    const RowScaleArgs scales{.x = x,
                              .offs = offs,
                              .rowwise = operand(Form::kRowwise),
                              .colwise = operand(Form::kColwise)};
    return [=](const Exec& exec) {
      pad_groups(pad, exec);
      quantize_row_scale(scales, exec);
    };
  };
}

struct Ops {
  std::string name;
  Prepare prepare;
};

class UnseenOffs : public ::testing::TestWithParam<Ops> {
 protected:
  void SetUp() override {
    if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(UnseenOffs, AreReadAtEveryReplayOfAGraph) { expect_replay(GetParam().prepare); }
TEST_P(UnseenOffs, AreClampedToEndsThatDoNotDecrease) { expect_rising_ends(GetParam().prepare); }

INSTANTIATE_TEST_SUITE_P(
    , UnseenOffs,
    ::testing::Values(Ops{"QuantizeAndBackPlain", quantize_and_back(ScaleLayout::kPlain)},
                      Ops{"QuantizeAndBackSwizzled", quantize_and_back(ScaleLayout::kSwizzled)},
                      Ops{"QuantizeAndBackQuads", quantize_and_back(ScaleLayout::kQuads)},
                      Ops{"Fused", fused_ops()}, Ops{"PadAndRowScale", pad_and_row_scale()}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moxie::testing
#endif
