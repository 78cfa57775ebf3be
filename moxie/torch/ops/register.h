// One function per family of ops: it registers the family's functions under the names of schema.cc.
#pragma once

#include <torch/library.h>

namespace moxie::ops {

void register_quantize(torch::Library& m);
void register_dequantize(torch::Library& m);
void register_requantize(torch::Library& m);
void register_row_scale(torch::Library& m);
void register_scale_layout(torch::Library& m);
void register_groups(torch::Library& m);
void register_grouped_gemm(torch::Library& m);
void register_quantize_weights(torch::Library& m);
void register_sum_groups(torch::Library& m);
void register_swiglu(torch::Library& m);
void register_fused(torch::Library& m);
void register_stats(torch::Library& m);
void register_gate_logits(torch::Library& m);
void register_route(torch::Library& m);
void register_permute(torch::Library& m);

}  // namespace moxie::ops
