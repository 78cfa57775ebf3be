// The checks that ops share. Each throws Error with the op, the rule and the value.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/layout/panel.h"
#include "moxie/core/layout/shape.h"

namespace moxie {

// The most groups that an op takes. Each CTA of a kernel looks for its rows with 256 threads, and a
// thread looks at up to four groups (group_search.cuh).
inline constexpr int64_t kMaxGroups = 1024;

// offs [G]: the exclusive end of each group, non-decreasing, the last one at most R. Rows past the
// last end belong to no group. Absent: all rows form one group.
using OptionalOffs = std::optional<View<const int32_t>>;

// Where a quantizer writes one form of x. operand_shape() gives the shapes of qdata and scale.
struct QuantizedOut {
  Block block;  // rows x cols of x (not of the stored operand) that share a scale
  ScaleLayout layout = ScaleLayout::kPlain;
  View<e4m3> qdata;
  View<e8m0> scale;
};

// Checks x and offs and returns the panels. The values of offs are checked only if the host can
// read them; on a GPU, group_end() clamps them instead.
Panels make_panels(std::string_view op, const Shape& x, const OptionalOffs& offs, Backend backend);

// Checks offs alone: its ends must not decrease and must not pass `limit`. `what` is the error
// message's word for the things that offs counts ("rows").
void check_offs(std::string_view op, const View<const int32_t>& offs, int64_t limit,
                std::string_view what, Backend backend);

void check_operand_block(std::string_view op, Form form, Block block, const Panels& panels);
// Checks that the layout supports the block: quads need blocks of 128 along k.
void check_layout(std::string_view op, Form form, Block block, ScaleLayout layout);
void check_shape(std::string_view op, std::string_view argument, const Shape& shape,
                 const Shape& expected);
void check_quantized_out(std::string_view op, Form form, const QuantizedOut& out, const Shape& x,
                         const Panels& panels);

std::optional<int64_t> num_groups(const OptionalOffs& offs);
std::optional<int64_t> num_groups(const Panels& panels);

}  // namespace moxie
