// The backends of permute, unpermute and permute_quantize; arguments arrive checked. Private to
// this folder.
#pragma once

#include "moxie/core/permute/permute.h"
#include "moxie/core/permute/permute_quantize.h"

namespace moxie {

namespace ref {
void permute(const PermuteArgs& args);
void unpermute(const UnpermuteArgs& args);
void unpermute_weights(const UnpermuteWeightsArgs& args);
void permute_quantize(const PermuteQuantizeArgs& args);
}  // namespace ref
namespace cpu {
void permute(const PermuteArgs& args, const Exec& exec);
void unpermute(const UnpermuteArgs& args, const Exec& exec);
void unpermute_weights(const UnpermuteWeightsArgs& args, const Exec& exec);
void permute_quantize(const PermuteQuantizeArgs& args, const Panels& panels, const Exec& exec);
}  // namespace cpu
namespace cuda {
void permute(const PermuteArgs& args, void* stream);
void unpermute(const UnpermuteArgs& args, void* stream);
void unpermute_weights(const UnpermuteWeightsArgs& args, void* stream);
void permute_quantize(const PermuteQuantizeArgs& args, const Panels& panels, void* stream);
}  // namespace cuda

// The order of the sum in unpermute_weights: partial sum i adds columns i, i + kDotLanes, ..., then
// the kDotLanes partial sums are added pairwise. Every backend can follow it with its own vectors.
inline constexpr int kDotLanes = 64;

}  // namespace moxie
