// Helpers for all autograd nodes.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "moxie/torch/ops.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// Returns the variables that forward saved. Every backward calls this before it disables autograd:
// under activation checkpointing, reading them reruns forward, which needs autograd.
inline torch::autograd::variable_list saved_for_backward(torch::autograd::AutogradContext* ctx,
                                                         const char* op) {
  TORCH_CHECK(!c10::GradMode::is_enabled(), op, ": a second derivative is not implemented");
  return ctx->get_saved_variables();
}

// Whether torch.compile or torch.export is tracing the tensor.
inline bool is_traced(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
}

// Whether the graph alone owns the tensors it saves. With saved-tensor hooks others may hold them
// too, or they may be replaced.
inline bool saves_without_hooks() { return !at::SavedTensorDefaultHooks::get_hooks(); }

// Frees saved tensors as soon as backward has used them. Without it, the graph holds them until the
// node ends.
class SavedMemory {
 public:
  // without_hooks: what saves_without_hooks() returned when the tensors were saved.
  explicit SavedMemory(bool without_hooks)
      : may_release_(without_hooks && !torch::autograd::get_current_graph_task_keep_graph()) {}

  bool may_release() const { return may_release_; }
  // Frees the tensor if it has no owners except the graph and `saved`.
  void release(at::Tensor& saved) const {
    if (may_release_ && saved.defined() && !is_traced(saved) && saved.use_count() == 2 &&
        saved.has_storage() && saved.storage().use_count() == 1)
      saved.storage().unsafeGetStorageImpl()->reset();
    saved.reset();
  }

 private:
  bool may_release_;
};

// Converts the arguments of grouped_mm, in the order of its schema, to options.
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
