// Which kernels a recipe takes, decided here and nowhere else.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "moxie/core/layout/swizzle.h"
#include "moxie/torch/recipe.h"

namespace moxie::ops {

enum class Path : uint8_t {
  kEmulated,  // decode, then the product of the device: exact numerics, anywhere
  kSm90,      // Hopper: our FP8 GEMM, where core's why_not_sm90() has no objection; else emulated
  kSm90Rows,  // Hopper: torch's FP8 GEMM with a scale per row, the same with why_not_sm90_rows()
  kSm100,     // Blackwell: torch's block-scaled GEMM
};

struct Choice {
  Path path;
  std::string reason;  // why not a faster one; empty on the fastest
};

// Where the ops of a tensor run. Inside a Meta kernel, under torch.compile, the tensors of a GPU
// say that they are on none, and which one it is cannot be known: then it is the current one.
c10::Device device_behind(const at::Tensor& tensor);

// While it lives, so are tensors of this thread that a Meta kernel made, if those of `like` are: an
// op that calls others inside a Meta kernel passes such tensors on.
class TracedLike {
 public:
  explicit TracedLike(const at::Tensor& like);
  ~TracedLike();
  TracedLike(const TracedLike&) = delete;
  TracedLike& operator=(const TracedLike&) = delete;

 private:
  bool before_;
};

// Whether choose_path() looks at the sizes of w. Where it does they are fixed under torch.compile,
// as they are in any model.
bool sizes_matter(const Recipe& recipe, c10::Device device);
// n and k are those of w [G, n, k].
Choice choose_path(const Recipe& recipe, c10::Device device, int64_t n, int64_t k);
// The same for a GPU that need not be there; a capability of 90 is Hopper.
Choice choose_path_on_gpu(const Recipe& recipe, int capability, int64_t n, int64_t k);

// What choose_path(), which knows w alone, cannot tell of one pass.
struct RowScaledPass {
  int64_t rows, groups;
  at::ScalarType result;
  bool aligned;  // both operands begin at a multiple of 16 bytes
};
// What of it kSm90Rows does not take, in words; empty: it takes all of it.
std::string why_not_sm90_rows(const RowScaledPass& pass);

// The layout in which a path's operands are made: that which its GEMM reads, swizzled on Blackwell
// and quads on Hopper (of recipes whose blocks are all of 128 along the contraction; else plain,
// which are put in order for each product). Where they are decoded on a GPU and all blocks are of
// 32 it is swizzled: its kernels write and read those faster (docs/kernels/quantize.md). Of larger
// blocks they gain little, and swizzled ones are repeated.
ScaleLayout choose_layout(const Recipe& recipe, Path path, c10::DeviceType device);

constexpr const char* name(Path path) {
  switch (path) {
    case Path::kEmulated: return "emulated";
    case Path::kSm90: return "sm90";
    case Path::kSm90Rows: return "sm90_rows";
    case Path::kSm100: break;
  }
  return "sm100";
}

// For tests: as if choose_path() had chosen it on every device, or on every GPU, for each recipe
// that the path can multiply; an empty name ends that. While kEmulated is forced on every device,
// each has the layouts of a GPU.
enum class ForceOn : uint8_t { kEveryDevice, kGpus };
void force_path(std::string_view name, ForceOn on = ForceOn::kEveryDevice);

}  // namespace moxie::ops
