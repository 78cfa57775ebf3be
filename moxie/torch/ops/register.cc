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
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Meta, m) { register_all(m); }
TORCH_LIBRARY_IMPL(moxie, CPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(moxie, CUDA, m) { register_all(m); }

// Not differentiable, as argmax is not: results never require grad, whatever x does. Without these
// lines torch would give every result a grad_fn that warns, and no gradient. pad_groups and
// unpad_groups are in autograd/groups.cc.
TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  for (const char* op : {"quantize_rowwise",   "quantize_rowwise.out",
                         "quantize_colwise",   "quantize_colwise.out",
                         "quantize_both",      "quantize_both.out",
                         "dequantize_rowwise", "dequantize_rowwise.out",
                         "dequantize_colwise", "dequantize_colwise.out",
                         "requantize",         "requantize.out",
                         "quantize_per_row",   "quantize_per_row.out",
                         "quantize_per_col",   "quantize_per_col.out",
                         "swizzle_scale",      "unswizzle_scale",
                         "replicate_scale",    "compact_scale",
                         "pad_groups.out",     "unpad_groups.out",
                         "padded_offs"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}

}  // namespace moxie::ops
