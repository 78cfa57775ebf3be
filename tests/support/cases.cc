#include "tests/support/cases.h"

#include <cmath>
#include <sstream>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/groups/groups.h"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/requantize/requantize.h"
#include "moxie/core/row_scale/dequantize_row_scale.h"
#include "moxie/core/scale_layout/scale_layout.h"
#include "tests/support/arena.h"
#include "tests/support/input.h"
#include "tests/support/moe_cases.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

constexpr ScaleRule kRules[] = {ScaleRule::kRceil, ScaleRule::kFloor, ScaleRule::kCeil,
                                ScaleRule::kEven};

// What all cases choose at random: a shape, groups, and by how many elements buffers are
// misaligned.
struct Problem {
  Shape x;
  std::vector<int32_t> offs;  // empty: no offs
  int misalign = 0;
  std::ostringstream text;

  std::optional<int64_t> groups() const {
    return offs.empty() ? std::nullopt : std::optional<int64_t>(offs.size());
  }
  OptionalOffs offs_in(Arena& arena) const {
    if (offs.empty()) return std::nullopt;
    return arena.input(offs, {static_cast<int64_t>(offs.size())});
  }
};

// About 6 % of the cases are large: over 64k elements, so more than one tile of any kernel. One in
// 2,000 is huge: its results are over 16 MiB, so the cpu backend uses streaming stores.
Shape random_shape(Random& random, bool weights) {
  if (random.below(2000) == 0) {
    const auto cols = random.pick<int64_t>({640, 1000, 5120, 8300});
    const int64_t rows = ceil_div<int64_t>(17 << 20, cols) + random.between(0, 200);
    return weights ? Shape{2, ceil_div<int64_t>(rows, 2), cols} : Shape{rows, cols};
  }
  const bool large = random.chance(6);
  int64_t cols = random.pick<int64_t>({1, 16, 31, 32, 33, 48, 64, 96, 127, 128, 129, 160, 256});
  if (random.chance(30)) cols = random.between(0, 300);
  if (large) cols = random.pick<int64_t>({128, 200, 256, 384, 512, 1000, 1024});
  const int64_t budget = large ? random.between(66'000, 160'000) : random.between(0, 4'000);
  const int64_t rows = large ? ceil_div<int64_t>(budget, cols) : budget / max<int64_t>(cols, 8);
  if (!weights) return {rows, cols};
  const int64_t groups = random.pick<int64_t>({0, 1, 2, 3, 5});
  return {groups, large ? rows : rows / max<int64_t>(groups, 1), cols};
}

Problem random_problem(Random& random, bool may_be_weights = true) {
  Problem problem;
  const bool weights = may_be_weights && random.chance(30);
  problem.x = random_shape(random, weights);
  problem.misalign = random.chance(50) ? 0 : static_cast<int>(random.between(1, 7));
  if (!weights && random.chance(75)) {
    const auto groups = random.pick<int64_t>({1, 2, 3, 4, 5, 8, 16, 31, 33, 64, 100, 300, 1024});
    problem.offs = random_offs(random, problem.x[0], groups);
  }
  problem.text << problem.x << " groups " << problem.offs.size() << " misalign "
               << problem.misalign;
  if (problem.offs.size() && problem.offs.size() <= 8)
    for (const int32_t end : problem.offs) problem.text << ' ' << end;
  return problem;
}

Block random_block(Random& random, Form form, const Problem& problem) {
  for (;;) {
    const Block block = kBlocks[random.below(std::size(kBlocks))];
    if (!is_operand_block(block, form)) continue;
    if (form == Form::kRowwise && block.rows > 1 && !problem.offs.empty()) continue;
    return block;
  }
}

QuantizedOut operand_in(Arena& arena, const Problem& p, Form form, Block block,
                        ScaleLayout layout) {
  const auto shape = operand_shape<int64_t>(p.x, p.groups(), form, block, layout);
  return {block, layout, arena.output<e4m3>(shape.qdata), arena.output<e8m0>(shape.scale)};
}

ScaleLayout random_layout(Random& random, Form form, Block block) {
  if (k_of(block, form) == kQuadBlock && random.chance(50)) return ScaleLayout::kQuads;
  return random.chance(70) ? ScaleLayout::kPlain : ScaleLayout::kSwizzled;
}

Case quantize_case(Random& random) {
  auto p = random_problem(random);
  const Data data = random_data(random);
  Input input(random, numel(p.x), data);
  const auto rule = kRules[random.below(4)];
  const int64_t which = random.below(3);  // rowwise, colwise, both
  const Block row = random_block(random, Form::kRowwise, p);
  Block col = random_block(random, Form::kColwise, p);
  if (row.rows == row.cols && random.chance(50)) col = row;  // square: one scale computation
  const auto row_layout = random_layout(random, Form::kRowwise, row);
  const auto col_layout = random_layout(random, Form::kColwise, col);
  p.text << " data " << int(data) << ' ' << name(input.format) << ' ' << name(rule)
         << (which != 1 ? " rowwise " + name(row) + " " + name(row_layout) : "")
         << (which != 0 ? " colwise " + name(col) + " " + name(col_layout) : "");
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.x = x, problem.offs = offs;
    QuantizeArgs args{.x = input.in(arena, x), .offs = problem.offs_in(arena), .rule = rule};
    if (which != 1) args.rowwise = operand_in(arena, problem, Form::kRowwise, row, row_layout);
    if (which != 0) args.colwise = operand_in(arena, problem, Form::kColwise, col, col_layout);
    quantize(args, exec);
    return arena.results();
  };
  return {"quantize " + p.text.str(), numel(p.x), run};
}

Case dequantize_case(Random& random) {
  auto p = random_problem(random);
  const Form form = random.chance(50) ? Form::kRowwise : Form::kColwise;
  const Block block = random_block(random, form, p);
  const auto layout = random_layout(random, form, block);
  const auto shape = operand_shape<int64_t>(p.x, p.groups(), form, block, layout);
  const auto qdata = random_bytes<e4m3>(random, numel(shape.qdata));
  const auto scale = random_bytes<e8m0>(random, numel(shape.scale));
  const auto format = random.chance(50) ? Format::kBf16 : Format::kF32;
  p.text << ' ' << name(form) << ' ' << name(block) << ' ' << name(layout) << ' ' << name(format);
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.offs = offs;
    DequantizeArgs args{.form = form,
                        .block = block,
                        .layout = layout,
                        .qdata = arena.input(qdata, shape.qdata),
                        .scale = arena.input(scale, shape.scale),
                        .offs = problem.offs_in(arena),
                        .x = {}};
    args.x = arena.float_output(format, x);
    dequantize(args, exec);
    return arena.results();
  };
  return {"dequantize " + p.text.str(), numel(p.x), run};
}

Case requantize_case(Random& random) {
  auto p = random_problem(random);
  const Block block = random_block(random, Form::kRowwise, p);
  const Block col = random_block(random, Form::kColwise, p);
  const auto from_layout = random_layout(random, Form::kRowwise, block);
  const auto shape = operand_shape<int64_t>(p.x, p.groups(), Form::kRowwise, block, from_layout);
  const auto qdata = random_bytes<e4m3>(random, numel(shape.qdata));
  auto scale = random_bytes<e8m0>(random, numel(shape.scale));
  if (random.chance(70))  // scales such as quantize makes, so that few blocks are NaN
    for (auto& value : scale) value.code = static_cast<uint8_t>(110 + value.code % 20);
  const auto rule = kRules[random.below(4)];
  const auto layout = random_layout(random, Form::kColwise, col);
  p.text << " from " << name(block) << ' ' << name(from_layout) << " to " << name(col) << ' '
         << name(layout) << ' ' << name(rule);
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.x = x, problem.offs = offs;
    requantize({.block = block,
                .from_layout = from_layout,
                .qdata = arena.input(qdata, shape.qdata),
                .scale = arena.input(scale, shape.scale),
                .offs = problem.offs_in(arena),
                .colwise = operand_in(arena, problem, Form::kColwise, col, layout),
                .rule = rule},
               exec);
    return arena.results();
  };
  return {"requantize " + p.text.str(), numel(p.x), run};
}

Case row_scale_case(Random& random) {
  auto p = random_problem(random);
  Input input(random, numel(p.x), random_data(random));
  const int64_t which = random.below(3);
  p.text << ' ' << name(input.format) << (which != 1 ? " rowwise" : "")
         << (which != 0 ? " colwise" : "");
  auto run = [=, x = p.x, offs = p.offs, groups = p.groups(),
              misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.offs = offs;
    RowScaleArgs args{.x = input.in(arena, x),
                      .offs = problem.offs_in(arena),
                      .rowwise = std::nullopt,
                      .colwise = std::nullopt};
    const auto operand = [&](Form form) -> RowScaleOut {
      const auto shape = row_scale_shape<int64_t>(x, groups, form);
      return {arena.output<e4m3>(shape.qdata), arena.output<float>(shape.scale)};
    };
    if (which != 1) args.rowwise = operand(Form::kRowwise);
    if (which != 0) args.colwise = operand(Form::kColwise);
    quantize_row_scale(args, exec);
    return arena.results();
  };
  return {"quantize_row_scale " + p.text.str(), numel(p.x), run};
}

Case dequantize_row_scale_case(Random& random) {
  auto p = random_problem(random);
  const Form form = random.chance(50) ? Form::kRowwise : Form::kColwise;
  const auto shape = row_scale_shape<int64_t>(p.x, p.groups(), form);
  const auto qdata = random_bytes<e4m3>(random, numel(shape.qdata));
  std::vector<float> scale(numel(shape.scale));
  for (float& value : scale) value = std::ldexp(1.f, static_cast<int>(random.between(-140, 120)));
  const auto format = random.chance(50) ? Format::kBf16 : Format::kF32;
  p.text << ' ' << name(form) << ' ' << name(format);
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.offs = offs;
    DequantizeRowScaleArgs args{.form = form,
                                .qdata = arena.input(qdata, shape.qdata),
                                .scale = arena.input(scale, shape.scale),
                                .offs = problem.offs_in(arena),
                                .x = {}};
    args.x = arena.float_output(format, x);
    dequantize_row_scale(args, exec);
    return arena.results();
  };
  return {"dequantize_row_scale " + p.text.str(), numel(p.x), run};
}

Case groups_case(Random& random) {
  auto p = random_problem(random, /*may_be_weights=*/false);
  if (p.offs.empty()) p.offs = random_offs(random, p.x[0], 3);
  const auto alignment = random.pick<int64_t>({1, 2, 3, 16, 32, 100, 128});
  const bool pad = random.chance(50), bounded = random.chance(50);
  const auto groups = static_cast<int64_t>(p.offs.size());
  const int64_t padded_rows = pad_groups_rows(p.x[0], groups, alignment);
  const Shape from = pad ? p.x : Shape{padded_rows, p.x[1]};
  const auto rows = random_bytes<std::byte>(random, numel(from));
  std::vector<int32_t> ends(groups), starts(groups, 0);
  padded_offs({.offs = {p.offs.data(), {groups}},
               .alignment = alignment,
               .padded = {ends.data(), {groups}}},
              {.backend = Backend::kRef});
  for (int64_t g = 1; g < groups; ++g) starts[g] = ends[g - 1];
  p.text << " alignment " << alignment;
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    const auto offs_view = arena.input(offs, {groups});
    if (pad) {
      pad_groups({.x = arena.input(rows, x),
                  .offs = offs_view,
                  .alignment = alignment,
                  .padded = arena.output<std::byte>({padded_rows, x[1]}),
                  .starts = arena.output<int32_t>({groups}),
                  .ends = arena.output<int32_t>({groups})},
                 exec);
    } else {
      unpad_groups({.padded = arena.input(rows, from),
                    .offs = offs_view,
                    .starts = arena.input(starts, {groups}),
                    .x = arena.output<std::byte>(x)},
                   exec);
    }
    padded_offs({.offs = offs_view,
                 .rows = bounded ? std::optional(x[0]) : std::nullopt,
                 .alignment = alignment,
                 .padded = arena.output<int32_t>({groups})},
                exec);
    return arena.results();
  };
  return {(pad ? "pad_groups " : "unpad_groups ") + p.text.str(), numel(from), run};
}

Case swizzle_case(Random& random) {
  auto p = random_problem(random);
  const Form form = random.chance(50) ? Form::kRowwise : Form::kColwise;
  if (form == Form::kColwise && !p.offs.empty())
    p.offs = random_offs(random, p.x[1], static_cast<int64_t>(p.offs.size()));
  const Shape swizzled = swizzled_shape<int64_t>(p.x, p.groups(), form);
  const bool forward = random.chance(50);
  const auto scale = random_bytes<e8m0>(random, numel(forward ? p.x : swizzled));
  p.text << ' ' << name(form);
  auto run = [=, x = p.x, offs = p.offs, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    Problem problem;
    problem.offs = offs;
    if (forward)
      swizzle_scale({.form = form,
                     .plain = arena.input(scale, x),
                     .offs = problem.offs_in(arena),
                     .swizzled = arena.output<e8m0>(swizzled)},
                    exec);
    else
      unswizzle_scale({.form = form,
                       .swizzled = arena.input(scale, swizzled),
                       .offs = problem.offs_in(arena),
                       .plain = arena.output<e8m0>(x)},
                      exec);
    return arena.results();
  };
  return {(forward ? "swizzle_scale " : "unswizzle_scale ") + p.text.str(), numel(p.x), run};
}

// Runs replicate_scale and then compact_scale on its result, because a CPU refuses to compact
// scales that differ inside a block.
Case replicate_case(Random& random) {
  auto p = random_problem(random);
  p.offs.clear();
  const Form form = random.chance(50) ? Form::kRowwise : Form::kColwise;
  const Block block = random_block(random, form, p);
  const Shape compact = compact_shape<int64_t>(p.x, form, block);
  const auto scale = random_bytes<e8m0>(random, numel(compact));
  p.text << ' ' << name(form) << ' ' << name(block);
  auto run = [=, x = p.x, misalign = p.misalign](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    const auto replicated = arena.output<e8m0>(x);
    replicate_scale({.form = form,
                     .block = block,
                     .compact = arena.input(scale, compact),
                     .replicated = replicated},
                    exec);
    compact_scale({.form = form,
                   .block = block,
                   .replicated = {replicated.data, replicated.shape},
                   .compact = arena.output<e8m0>(compact)},
                  exec);
    return arena.results();
  };
  return {"replicate_scale " + p.text.str(), numel(p.x), run};
}

}  // namespace

Case make_case(uint64_t number) {
  Random random(number);
  // quantize gets 10 of 24 cases, because it has most of the arithmetic.
  const int64_t op = random.below(24);
  if (op < 10) return quantize_case(random);
  if (op < 12) return dequantize_case(random);
  if (op < 14) return requantize_case(random);
  if (op < 15) return row_scale_case(random);
  if (op < 16) return dequantize_row_scale_case(random);
  if (op < 18) return groups_case(random);
  if (op < 19) return swizzle_case(random);
  if (op < 20) return replicate_case(random);
  if (op < 21) return route_case(random);
  if (op < 22) return top_k_case(random);
  if (op < 23) return random.chance(50) ? split_case(random) : finish_products_case(random);
  return permute_case(random);
}

}  // namespace moxie::testing
