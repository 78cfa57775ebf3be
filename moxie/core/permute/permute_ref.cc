// The spec as loops.
#include "moxie/core/base/parallel.h"
#include "moxie/core/permute/backends.h"

namespace moxie::ref {
namespace {

float at(const ConstFloatView& x, int64_t i) {
  return x.format == Format::kF32 ? static_cast<const float*>(x.data)[i]
                                  : to_float(static_cast<const bf16*>(x.data)[i]);
}

void put(const FloatView& out, int64_t i, float value) {
  if (out.format == Format::kF32)
    static_cast<float*>(out.data)[i] = value;
  else
    static_cast<bf16*>(out.data)[i] = to_bf16(value);
}

}  // namespace

void permute(const PermuteArgs& args) {
  const KernelScope scope;
  const int64_t dim = args.x.dim(1);
  for (int64_t r = 0; r < args.slot_of.dim(0); ++r) {
    const int64_t slot = args.slot_of.data[r], token = slot / args.top_k;
    for (int64_t d = 0; d < dim; ++d) {
      const float value = at(args.x, token * dim + d);
      put(args.rows, r * dim + d, args.weights ? value * args.weights->data[slot] : value);
    }
  }
}

void unpermute(const UnpermuteArgs& args) {
  const KernelScope scope;
  const int64_t tokens = args.x.dim(0), dim = args.x.dim(1);
  const int64_t k = tokens ? args.row_of.dim(0) / tokens : 0;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < dim; ++d) {
      float sum = 0;
      for (int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
        const float value = at(args.rows, args.row_of.data[slot] * dim + d);
        sum += args.weights ? args.weights->data[slot] * value : value;
      }
      put(args.x, t * dim + d, sum);
    }
}

void unpermute_weights(const UnpermuteWeightsArgs& args) {
  const KernelScope scope;
  const int64_t tokens = args.dout.dim(0), dim = args.dout.dim(1);
  const int64_t k = tokens ? args.row_of.dim(0) / tokens : 0;
  for (int64_t slot = 0; slot < tokens * k; ++slot) {
    const int64_t dout = slot / k * dim, row = args.row_of.data[slot] * dim;
    float lanes[kDotLanes] = {};
    for (int64_t d = 0; d < dim; ++d)
      lanes[d % kDotLanes] += at(args.dout, dout + d) * at(args.rows, row + d);
    for (int step = kDotLanes / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    args.dweights.data[slot] = lanes[0];
  }
}

}  // namespace moxie::ref
