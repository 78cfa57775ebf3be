// Trains one grouped linear, a matrix per expert, until it does what a hidden one does. Weights are
// f32 masters; their FP8 forms are quantized once per step and given to the product.
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

// Both forms of the weights, which whoever changes the weights refreshes.
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
  // Rows as a router left them: an expert without any, and 24 rows at the end for nobody.
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
      // The gradient of a mean over all rows and outputs, per row of an expert.
      w.sub_(w.grad(), kLearningRate * kOut * kExperts / 2);
      w.mutable_grad().reset();
      cache.refresh(w.detach());
    }
    last = loss.item<float>();
    if (step == 0) first = last;
    if (step % 5 == 0 || step == kSteps - 1) std::printf("step %2d  loss %.5f\n", step, last);
  }
  // What is left is the rounding of FP8.
  return last < first / 100 ? 0 : 1;
}
