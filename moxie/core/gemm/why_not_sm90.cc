// What the Hopper kernel needs, in words. Pure, and in every build: a CPU can ask too.
#include <sstream>

#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/grouped_wgrad.h"

namespace moxie {
namespace {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

constexpr int kAlignment = 16;  // bytes, of what the copy engine reads and of 16-byte stores

std::string why_not_blocks(const char* name, const GemmOperand& operand, int outer_block) {
  if (operand.outer_block != outer_block || operand.k_block != 128)
    return text("the Hopper kernel needs ", name, " in blocks of ", outer_block,
                " x 128 (outer x k), got ", operand.outer_block, " x ", operand.k_block);
  if (operand.layout == ScaleLayout::kQuads) return "";
  return text("the Hopper kernel needs the scales of ", name, " in quads, got ",
              moxie::name(operand.layout), " ones");
}

// Four scales are one load.
std::string why_not_scales(const char* name, const GemmOperand& operand) {
  const void* data = operand.scale.data;
  if (reinterpret_cast<uintptr_t>(data) % kQuad == 0) return "";
  return text("the Hopper kernel needs the scales of ", name, " to start at a multiple of ", kQuad,
              " bytes, got ", data);
}

std::string why_not_size(const char* name, int64_t size) {
  if (size > 0 && size % 16 == 0) return "";
  return text("the Hopper kernel needs ", name, " to be a multiple of 16, got ", size);
}

std::string why_not_aligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) return "";
  return text("the Hopper kernel needs ", name, " to start at a multiple of ", kAlignment,
              " bytes, got ", data);
}

// Coordinates of the copy engine are 32-bit, in bytes along k and along columns of the result.
std::string why_not_count(const char* name, int64_t count) {
  if (count < (int64_t{1} << 31) - 1024) return "";
  return text("the Hopper kernel needs fewer than 2^31 - 1024 ", name, ", got ", count);
}
std::string why_not_columns(int64_t n) {
  if (n < (int64_t{1} << 30) - 1024) return "";
  return text("the Hopper kernel needs fewer than 2^30 - 1024 columns of the result, got ", n);
}

std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons)
    if (!reason.empty()) return reason;
  return "";
}

}  // namespace

std::string why_not_sm90(const GroupedMmArgs& args) {
  return first_of({
      why_not_blocks("a", args.a, 1),
      why_not_blocks("b", args.b, 128),
      why_not_size("n", args.b.qdata.dim(-2)),
      why_not_size("k", args.b.qdata.dim(-1)),
      why_not_columns(args.b.qdata.dim(-2)),
      why_not_count("of k", args.b.qdata.dim(-1)),
      why_not_count("rows", args.a.qdata.dim(0)),
      why_not_count("rows of b", args.b.qdata.shape[0] * args.b.qdata.dim(-2)),
      why_not_aligned("a", args.a.qdata.data),
      why_not_aligned("b", args.b.qdata.data),
      why_not_scales("a", args.a),
      why_not_scales("b", args.b),
      why_not_aligned("out", args.out.data),
  });
}

std::string why_not_sm90(const GroupedWgradArgs& args) {
  return first_of({
      why_not_blocks("a", args.a, 1),
      why_not_blocks("b", args.b, 32),
      why_not_size("n", args.a.qdata.dim(0)),
      why_not_size("k", args.b.qdata.dim(0)),
      why_not_columns(args.b.qdata.dim(0)),
      why_not_count("padded rows", args.a.qdata.dim(1)),
      why_not_count("rows of all results", args.out.shape[0] * args.out.shape[1]),
      why_not_aligned("a", args.a.qdata.data),
      why_not_aligned("b", args.b.qdata.data),
      why_not_scales("a", args.a),
      why_not_scales("b", args.b),
      why_not_aligned("out", args.out.data),
  });
}

}  // namespace moxie
