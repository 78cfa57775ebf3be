// What the nodes share.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "moxie/torch/ops.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// What forward saved. Every backward asks first: under checkpointing this runs forward again, with
// autograd.
inline torch::autograd::variable_list saved_for_backward(torch::autograd::AutogradContext* ctx,
                                                         const char* op) {
  TORCH_CHECK(!c10::GradMode::is_enabled(), op, ": a second derivative is not implemented");
  return ctx->get_saved_variables();
}

// The arguments of grouped_mm in the order of its schema, as options.
inline GroupedMmOptions grouped_mm_options(const OptionalTensor& offs, std::string_view recipe,
                                           const OptionalTensor& bias,
                                           std::optional<at::ScalarType> dtype,
                                           const OptionalTensors& quantized_w,
                                           const OptionalTensor& main_grad) {
  return {.offs = offs,
          .recipe = recipe,
          .bias = bias,
          .dtype = dtype,
          .quantized_w = quantized_w,
          .main_grad = main_grad};
}

}  // namespace moxie::ops
