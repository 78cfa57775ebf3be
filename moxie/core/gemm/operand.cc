#include "moxie/core/gemm/operand.h"

#include "moxie/core/base/check.h"

namespace moxie {

void check_bias(std::string_view op, const std::optional<ConstFloatView>& bias, int64_t groups,
                int64_t n) {
  MOXIE_CHECK(!bias || bias->shape == Shape(n) || bias->shape == Shape(groups, n), op,
              ": bias must be ", Shape(n), " or ", Shape(groups, n), ", got ", bias->shape);
}

void check_gemm_operand(std::string_view op, std::string_view argument,
                        const GemmOperand& operand) {
  static_assert(sides_are<1, 32, 128>());
  const int outer_block = operand.outer_block, k_block = operand.k_block;
  MOXIE_CHECK(outer_block == 1 || outer_block == 32 || outer_block == 128, op, ": ", argument,
              " must have blocks of 1, 32 or 128 outer elements, got ", outer_block);
  MOXIE_CHECK(k_block == 32 || k_block == 128, op, ": ", argument,
              " must have blocks of 32 or 128 along k, got ", k_block);
  const ScaleLayout layout = operand.layout;
  MOXIE_CHECK(layout == ScaleLayout::kPlain || (layout == ScaleLayout::kQuads && k_block == 128),
              op, ": ", argument,
              " must have plain scales, or quads and blocks of 128 along k, got ", name(layout),
              " ones and blocks of ", k_block);
  const Shape& q = operand.qdata.shape;
  const Shape scale = scale_matrix<int64_t>(q.dim(-2), q.dim(-1), outer_block, k_block, layout);
  const Shape expected = q.dims == 3 ? Shape{q[0], scale[0], scale[1]} : scale;
  MOXIE_CHECK(operand.scale.shape == expected, op, ": the scale of ", argument, " must be ",
              expected, ", got ", operand.scale.shape);
}

}  // namespace moxie
