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

// Every block there is. 32 is what MX tensor cores multiply with a scale; 128 is what Hopper's FP8
// tensor cores can afford to, and is a valid MX block too once its scale is repeated.
inline constexpr Block kBlocks[] = {{1, 32},  {32, 1},   {32, 32},  {1, 128},
                                    {128, 1}, {128, 32}, {128, 128}};
inline constexpr int kMxBlock = 32;  // elements along the contraction per scale of an MX GEMM

// An op stores x in one of two forms. Both end as an operand [outer, k] whose contraction k is last
// and contiguous.
enum class Form : uint8_t {
  kRowwise,  // [rows, cols]: outer = rows, k = cols
  kColwise,  // [cols, rows], stored transposed: outer = cols, k = rows
};

constexpr const char* name(Form form) { return form == Form::kRowwise ? "rowwise" : "colwise"; }

// The block seen from the operand.
constexpr int outer_of(Block block, Form form) {
  return form == Form::kRowwise ? block.rows : block.cols;
}
constexpr int k_of(Block block, Form form) {
  return form == Form::kRowwise ? block.cols : block.rows;
}

inline std::string name(Block block) {
  return std::to_string(block.rows) + "x" + std::to_string(block.cols);
}

// A GEMM can only apply a scale that stays constant over 32 or more of the contraction.
constexpr bool is_operand_block(Block block, Form form) { return k_of(block, form) >= kMxBlock; }

}  // namespace moxie
