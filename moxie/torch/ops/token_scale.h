// Scales of tokens that came quantized: one integer in a graph (bits.h).
#pragma once

#include "moxie/torch/bits.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

struct TokenScaleSpec {
  Block block;         // 1x32 or 1x128, of the scales that are read
  ScaleLayout layout;  // plain, or swizzled where they are put in that order

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.block);
    f(self.layout, 2);
  }
};

}  // namespace moxie::ops
