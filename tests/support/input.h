// Random values in bf16 or f32, made once and copied to the memory of each backend.
#pragma once

#include <vector>

#include "moxie/core/base/view.h"
#include "tests/support/arena.h"
#include "tests/support/random.h"

namespace moxie::testing {

inline Data random_data(Random& random) {
  return random.pick({Data::kGaussianLike, Data::kGaussianLike, Data::kWide, Data::kWide,
                      Data::kSpecial, Data::kBits, Data::kZero});
}

struct Input {
  Format format;
  std::vector<bf16> half;
  std::vector<float> full;

  Input(Random& random, int64_t count, Data data)
      : format(random.chance(60) ? Format::kBf16 : Format::kF32) {
    if (format == Format::kBf16)
      half = random_values<bf16>(random, count, data);
    else
      full = random_values<float>(random, count, data);
  }
  ConstFloatView in(Arena& arena, Shape shape) const {
    if (format == Format::kBf16) return {arena.input(half, shape).data, format, shape};
    return {arena.input(full, shape).data, format, shape};
  }
};

}  // namespace moxie::testing
