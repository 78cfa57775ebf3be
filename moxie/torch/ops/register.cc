#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

// The same functions everywhere: each looks at the device of its arguments, and on Meta returns
// before there is anything to compute.
void register_all(torch::Library& m) {
  register_quantize(m);
  register_dequantize(m);
  register_requantize(m);
  register_row_scale(m);
  register_scale_layout(m);
  register_groups(m);
  register_grouped_gemm(m);
  register_quantize_weights(m);
  register_sum_groups(m);
  register_swiglu(m);
  register_fused(m);
  register_stats(m);
  register_gate_logits(m);
  register_route(m);
  register_permute(m);
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Meta, m) { register_all(m); }
TORCH_LIBRARY_IMPL(moxie, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(moxie, CUDA, m) { register_all(m); }

// Not differentiable, as argmax is not: results never require grad, whatever x does. Without these
// lines torch would give every result a grad_fn that warns, and no gradient. The differentiable
// ones are in autograd/.
TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  for (const char* op : {"quantize_rowwise",
                         "quantize_rowwise.out",
                         "quantize_colwise",
                         "quantize_colwise.out",
                         "quantize_both",
                         "quantize_both.out",
                         "dequantize_rowwise",
                         "dequantize_rowwise.out",
                         "dequantize_colwise",
                         "dequantize_colwise.out",
                         "requantize",
                         "requantize.out",
                         "quantize_per_row",
                         "quantize_per_row.out",
                         "quantize_per_col",
                         "quantize_per_col.out",
                         "swizzle_scale",
                         "unswizzle_scale",
                         "replicate_scale",
                         "compact_scale",
                         "pad_groups.out",
                         "unpad_groups.out",
                         "padded_offs",
                         "grouped_mm.quantized",
                         "grouped_dgrad",
                         "grouped_wgrad",
                         "grouped_wgrad_add_",
                         "sum_groups",
                         "quantization_stats",
                         "_add_once_",
                         "top_k",
                         "route",
                         "unpermute_weights",
                         "swiglu_backward",
                         "swiglu_quantize_rowwise",
                         "swiglu_quantize_both",
                         "swiglu_backward_quantize_both",
                         "permute_quantize_rowwise",
                         "permute_quantize_both",
                         "quantize_weights",
                         "quantize_weights.out"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}

// torch's fallback for lazy conjugates and negatives takes what an op wrote from what it returns,
// and these return nothing (it would write out of bounds). They resolve their inputs themselves.
void let_lazy_bits_through(torch::Library& m) {
  for (const char* op :
       {"quantize_rowwise.out", "quantize_colwise.out", "quantize_both.out",
        "dequantize_rowwise.out", "dequantize_colwise.out", "requantize.out",
        "quantize_per_row.out", "quantize_per_col.out", "pad_groups.out", "unpad_groups.out",
        "quantize_weights.out", "grouped_wgrad_add_", "_add_once_"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(moxie, Conjugate, m) { let_lazy_bits_through(m); }
TORCH_LIBRARY_IMPL(moxie, Negative, m) { let_lazy_bits_through(m); }

}  // namespace moxie::ops
