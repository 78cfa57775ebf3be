// A block is the rectangle of elements that share one scale, written rows x cols.
#pragma once

#include <cstdint>
#include <string>

namespace moxie {

struct Block {
  int rows = 1;
  int cols = 32;
  constexpr bool operator==(const Block&) const = default;
};

// All supported blocks. MX tensor cores apply a scale per 32 elements. On Hopper software applies
// it, and can afford to do so per 128; such a block is a valid MX block if its scale is repeated.
inline constexpr Block kBlocks[] = {{1, 32},  {32, 1},   {32, 32},  {1, 128},
                                    {128, 1}, {128, 32}, {128, 128}};
// Whether kSides are all the sides that blocks have. Code that has a case for each side asserts it,
// so that with a new side it does not compile until it has a case for that side, too.
template <int... kSides>
constexpr bool sides_are() {
  for (const Block block : kBlocks)
    if (((block.rows != kSides) && ...) || ((block.cols != kSides) && ...)) return false;
  return true;
}
inline constexpr int kMxBlock = 32;  // elements of the contraction that share a scale in MX GEMMs

// The two forms in which an op stores x. Both are an operand [outer, k] whose contraction dimension
// k is last and contiguous.
enum class Form : uint8_t {
  kRowwise,  // [rows, cols]: outer = rows, k = cols
  kColwise,  // [cols, rows], stored transposed: outer = cols, k = rows
};

constexpr const char* name(Form form) { return form == Form::kRowwise ? "rowwise" : "colwise"; }

// The sides of a block in the operand: along outer and along k.
constexpr int outer_of(Block block, Form form) {
  return form == Form::kRowwise ? block.rows : block.cols;
}
constexpr int k_of(Block block, Form form) {
  return form == Form::kRowwise ? block.cols : block.rows;
}

inline std::string name(Block block) {
  return std::to_string(block.rows) + "x" + std::to_string(block.cols);
}

// Whether a GEMM can apply the scale: it must be constant over at least 32 elements along k.
constexpr bool is_operand_block(Block block, Form form) { return k_of(block, form) >= kMxBlock; }

}  // namespace moxie
