// The spec as loops.
#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/permute/backends.h"

namespace moxie::ref {
void permute(const PermuteArgs& args) {
  const KernelScope scope;
  const int64_t dim = args.x.dim(1);
  for (int64_t r = 0; r < args.slot_of.dim(0); ++r) {
    const int64_t slot = args.slot_of.data[r], token = slot / args.top_k;
    for (int64_t d = 0; d < dim; ++d) {
      const float value = value_at(args.x, token * dim + d);
      put_value(args.rows, r * dim + d, args.weights ? value * args.weights->data[slot] : value);
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
        const float value = value_at(args.rows, args.row_of.data[slot] * dim + d);
        sum += args.weights ? args.weights->data[slot] * value : value;
      }
      put_value(args.x, t * dim + d, sum);
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
      lanes[d % kDotLanes] += value_at(args.dout, dout + d) * value_at(args.rows, row + d);
    for (int step = kDotLanes / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    args.dweights.data[slot] = lanes[0];
  }
}

// The definition: permute, then quantize.
void permute_quantize(const PermuteQuantizeArgs& args) {
  const Exec exec{.backend = Backend::kRef};
  const Values rows(args.x.format, {args.slot_of.dim(0), args.x.dim(1)});
  moxie::permute({.x = args.x, .slot_of = args.slot_of, .top_k = args.top_k, .rows = rows.view},
                 exec);
  moxie::quantize(args_of(rows.in(), args.forms), exec);
}

}  // namespace moxie::ref
