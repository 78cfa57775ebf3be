// How requantize reads one form and writes the other: one integer in a graph (bits.h).
#pragma once

#include "moxie/torch/ops/quantize.h"

namespace moxie::ops {

struct RequantizeSpec {
  Block block;              // of the rowwise form that is read
  ScaleLayout from_layout;  // of its scales
  Block colwise;            // of the result
  ScaleRule rule;
  ScaleLayout layout;  // of the result

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    f(self.block);
    f(self.from_layout, 2);
    f(self.colwise);
    f(self.rule, 2);
    f(self.layout, 2);
  }
};

}  // namespace moxie::ops
