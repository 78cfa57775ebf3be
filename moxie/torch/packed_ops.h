// The ops that autograd nodes call, through the dispatcher, so that torch.compile and selective
// checkpointing see them. What users write as text is an integer here (bits.h), which is the same
// in every process: a graph can be cached on disk.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <vector>

#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/ops/requantize.h"
#include "moxie/torch/ops/token_scale.h"
#include "moxie/torch/plan/plan.h"

namespace moxie::ops::packed {

// The forms that spec asks for: qdata and scale, qdata_t and scale_t.
std::vector<Tensor> quantize(const Tensor& x, const OptionalTensor& offs, const QuantizeSpec& spec);
std::vector<Tensor> swiglu_quantize(const Tensor& h, const OptionalTensor& offs,
                                    const QuantizeSpec& spec);
std::vector<Tensor> swiglu_backward_quantize(const Tensor& da, const Tensor& h,
                                             const OptionalTensor& offs, const QuantizeSpec& spec);
std::vector<Tensor> permute_quantize(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                                     const OptionalTensor& offs, const QuantizeSpec& spec);
// -> qdata_t, scale_t
std::vector<Tensor> requantize(const Quantized& x, const OptionalTensor& offs,
                               const RequantizeSpec& spec);
// The plain scales of tokens [rows, cols] -> one per 1 x 32
Tensor token_scale(const Tensor& scale, const OptionalTensor& offs, const c10::SymInt& rows,
                   const c10::SymInt& cols, const TokenScaleSpec& spec);
// In bf16; spec says how the scales come.
Tensor dequantize_tokens(const Quantized& x, const TokenScaleSpec& spec);

// The three passes.
struct GemmArgs {
  const Quantized &a, &b;
  const OptionalTensor& offs;
  PassPlan plan;
  std::optional<at::ScalarType> dtype = std::nullopt;  // of the result
  OptionalTensor bias = std::nullopt;                  // forward
  c10::SymInt num_rows = 0;                            // wgrad
};
Tensor grouped_mm(const GemmArgs& args);
Tensor grouped_dgrad(const GemmArgs& args);
Tensor grouped_wgrad(const GemmArgs& args);
void grouped_wgrad_add_(const Tensor& dw, const GemmArgs& args);

}  // namespace moxie::ops::packed
