// The rules of the Hopper kernel, in words. Pure functions, compiled in every build: a CPU build
// can explain what a GPU would do.
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

constexpr int kAlignment = 16;  // bytes: the alignment that TMA and 16-byte stores need

std::string why_not_blocks(const char* name, const GemmOperand& operand, int outer_block) {
  if (operand.outer_block != outer_block || operand.k_block != 128)
    return text("the Hopper kernel needs ", name, " in blocks of ", outer_block,
                " x 128 (outer x k), got ", operand.outer_block, " x ", operand.k_block);
  if (operand.layout == ScaleLayout::kQuads) return "";
  return text("the Hopper kernel needs the scales of ", name, " in quads, got ",
              moxie::name(operand.layout), " ones");
}

// One load reads four scales.
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

// TMA coordinates are int32, in bytes along k and along the columns of a bf16 result. The margin of
// 1024 keeps the coordinates of a tile that starts inside and ends outside from overflowing.
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
