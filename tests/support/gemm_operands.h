// Random operands of the Hopper GEMMs. They are not made by a quantizer, which would not give
// scales near the ends of e8m0, or NaN at chosen places.
#pragma once

#include <cmath>
#include <vector>

#include "moxie/core/gemm/operand.h"
#include "tests/support/arena.h"
#include "tests/support/random.h"

namespace moxie::testing {

// How random scale codes are drawn. The GEMMs multiply two scales by adding their codes, which only
// works for codes in [64, 190]; all kinds but kCalm have others too.
enum class Codes { kCalm, kLowTimesHigh, kHighTimesLow, kSomeZero, kEdges, kSomeNan };
inline constexpr int kNumCodes = 6;

inline uint8_t random_code(Random& random, Codes codes, bool is_a) {
  const auto around = [&](int low, int high) {
    return static_cast<uint8_t>(random.between(low, high));
  };
  switch (codes) {
    case Codes::kCalm: return around(125, 128);
    case Codes::kLowTimesHigh: return is_a ? around(0, 3) : around(240, 243);
    case Codes::kHighTimesLow: return is_a ? around(251, 254) : around(0, 3);
    case Codes::kSomeZero: return random.chance(5) ? 0 : around(125, 128);
    case Codes::kEdges: return is_a ? around(62, 65) : around(189, 192);
    case Codes::kSomeNan: return is_a && random.chance(1) ? kE8m0Nan : around(125, 128);
  }
  return 127;
}

struct Matrix {
  int64_t count, outer, k;  // a stack of `count`
  int outer_block;
  std::vector<e4m3> qdata;
  std::vector<e8m0> scale;

  int64_t scale_cols() const { return ceil_div<int64_t>(k, 128); }
  double at(int64_t g, int64_t i, int64_t j) const {
    const int64_t row = g * ceil_div<int64_t>(outer, outer_block) + i / outer_block;
    const e8m0 code = scale[row * scale_cols() + j / 128];
    if (code.code == kE8m0Nan) return NAN;
    return std::ldexp(double{to_float(qdata[(g * outer + i) * k + j])}, code.code - 127);
  }
  std::vector<double> decode() const {
    std::vector<double> values;
    values.reserve(count * outer * k);
    for (int64_t g = 0; g < count; ++g)
      for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < k; ++j) values.push_back(at(g, i, j));
    return values;
  }
};

inline Matrix random_matrix(Random& random, Shape shape, int outer_block, Codes codes, bool is_a) {
  Matrix m{shape[0], shape[1], shape[2], outer_block, {}, {}};
  m.qdata.resize(numel(shape));
  for (e4m3& q : m.qdata) {
    q = to_e4m3(random_value(random, Data::kGaussianLike));
    if (codes == Codes::kSomeNan && is_a && random.below(5000) == 0) q.bits = kE4m3Nan;
  }
  m.scale.resize(m.count * ceil_div<int64_t>(m.outer, outer_block) * m.scale_cols());
  for (e8m0& scale : m.scale) scale.code = random_code(random, codes, is_a);
  return m;
}

inline GemmOperand operand_in(Arena& arena, const Matrix& m, bool stack) {
  const int64_t rows = ceil_div<int64_t>(m.outer, m.outer_block);
  const Shape q = stack ? Shape{m.count, m.outer, m.k} : Shape{m.outer, m.k};
  // The kernel reads scales as quads, and must ignore their padding, which is NaN here.
  const int64_t quads = ceil_div<int64_t>(m.scale_cols(), kQuad), in_matrix = quads * rows * kQuad;
  std::vector<e8m0> scale(m.count * in_matrix, e8m0{kE8m0Nan});
  for (int64_t g = 0; g < m.count; ++g)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < m.scale_cols(); ++j)
        scale[g * in_matrix + quad_index(i, j, rows * kQuad)] =
            m.scale[(g * rows + i) * m.scale_cols() + j];
  const Shape s = stack ? Shape{m.count, quads * rows, kQuad} : Shape{quads * rows, kQuad};
  return {arena.input(m.qdata, q), arena.input(scale, s), m.outer_block, 128, ScaleLayout::kQuads};
}

}  // namespace moxie::testing
