// What the nodes share.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

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

// Whether it stands for a tensor of a graph that is being recorded, under torch.compile or export.
inline bool is_traced(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
}

// Whether a graph may own what it saves now alone. Hooks may keep it, or hand out something else.
inline bool saves_without_hooks() { return !at::SavedTensorDefaultHooks::get_hooks(); }

// Gives the memory of tensors that backward has used back before the node ends: the graph would
// hold them until then.
class SavedMemory {
 public:
  // without_hooks: what saves_without_hooks() said when they were saved.
  explicit SavedMemory(bool without_hooks)
      : may_release_(without_hooks && !torch::autograd::get_current_graph_task_keep_graph()) {}

  bool may_release() const { return may_release_; }
  // Frees it where nothing else can see it: then the graph and `saved` are its owners.
  void release(at::Tensor& saved) const {
    if (may_release_ && saved.defined() && !is_traced(saved) && saved.use_count() == 2 &&
        saved.has_storage() && saved.storage().use_count() == 1)
      saved.storage().unsafeGetStorageImpl()->reset();
    saved.reset();
  }

 private:
  bool may_release_;
};

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
