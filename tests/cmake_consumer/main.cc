// A user's program that quantizes one block: it gets headers, library and link flags from
// find_package(Moxie) alone.
#include <array>
#include <cstdio>

#include "moxie/core/quantize/quantize.h"

int main() {
  std::array<float, 32> x{};
  x[0] = 448.0f;
  x[1] = -1.0f;
  std::array<moxie::e4m3, 32> qdata{};
  std::array<moxie::e8m0, 1> scale{};
  const moxie::QuantizedOut rowwise{.block = {1, 32},
                                    .qdata = {.data = qdata.data(), .shape = {1, 32}},
                                    .scale = {.data = scale.data(), .shape = {1, 1}}};
  const moxie::ConstFloatView view{
      .data = x.data(), .format = moxie::Format::kF32, .shape = {1, 32}};
  moxie::quantize({.x = view, .rowwise = rowwise}, moxie::Exec{});
  const float first = moxie::to_float(qdata[0]) * moxie::to_float(scale[0]);
  const float second = moxie::to_float(qdata[1]) * moxie::to_float(scale[0]);
  std::printf("448 and -1 came back as %g and %g\n", first, second);
  return first == 448.0f && second == -1.0f ? 0 : 1;
}
