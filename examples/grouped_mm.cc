// Trains one grouped linear (a matrix per expert) to give the results of another whose weights it
// does not see. Weights are f32; they are quantized once per step, and the product gets their FP8
// forms.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "moxie/torch/ops.h"

namespace {

constexpr int64_t kRows = 1024, kIn = 128, kOut = 64, kExperts = 4;
constexpr double kLearningRate = 0.4;
constexpr int kSteps = 40;
constexpr std::string_view kRecipe = "mxfp8_rceil_128";

// The weights quantized for forward and for backward. Call refresh() after changing the weights.
class WeightCache {
 public:
  explicit WeightCache(const at::Tensor& w) {
    const auto [qdata, scale, qdata_t, scale_t] = moxie::ops::quantize_weights(w, kRecipe);
    tensors_ = {qdata, scale, qdata_t, scale_t};
  }

  void refresh(const at::Tensor& w) {
    moxie::ops::quantize_weights_out(w, tensors_[0], tensors_[1], tensors_[2], tensors_[3],
                                     kRecipe);
  }

  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }

 private:
  std::array<at::Tensor, 4> tensors_;
};

}  // namespace

int main() {
  at::manual_seed(0);
  const at::Tensor hidden = at::randn({kExperts, kOut, kIn}) / 11.3;  // so that y is about 1
  at::Tensor w = at::randn({kExperts, kOut, kIn}) / 11.3;
  w.requires_grad_();
  WeightCache cache(w.detach());
  // Ends of the experts' rows, as a router would give them: the second expert has no rows, and the
  // last 24 rows belong to none.
  const at::Tensor offs = at::tensor({300, 300, 557, 1000}, at::kInt);

  float first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = at::randn({kRows, kIn});
    const at::Tensor target =
        moxie::ops::grouped_mm(x, hidden, {.offs = offs, .recipe = "bf16", .dtype = at::kFloat});
    const at::Tensor y = moxie::ops::grouped_mm(
        x, w, {.offs = offs, .recipe = kRecipe, .quantized_w = cache.tensors()});
    const at::Tensor loss = (y - target).square().sum() / (kRows * kOut);
    loss.backward();
    {
      const at::NoGradGuard no_grad;
      // The loss is a mean over kOut outputs of the rows of all kExperts. The factor undoes that,
      // so that the step does not depend on these sizes.
      w.sub_(w.grad(), kLearningRate * kOut * kExperts / 2);
      w.mutable_grad().reset();
      cache.refresh(w.detach());
    }
    last = loss.item<float>();
    if (step == 0) first = last;
    if (step % 5 == 0 || step == kSteps - 1) std::printf("step %2d  loss %.5f\n", step, last);
  }
  // The loss cannot reach 0: FP8 rounds the results.
  return last < first / 100 ? 0 : 1;
}
