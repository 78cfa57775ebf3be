#include <memory>
#include <vector>

#include "moxie/core/row_scale/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"

namespace moxie::cpu {
namespace {

// Columns [col, col + cols) of one panel in the colwise result.
struct RowScaleStrip {
  uint8_t* qdata;
  int64_t stride;
  int64_t k;  // bytes of a row that this panel fills, the zeros of its tail included
  float* scale;
  bool stream;
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/row_scale/row_scale_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

std::vector<Panel> list_panels(const Panels& panels) {
  std::vector<Panel> all;
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g)
    all.push_back(panel = next_panel(panels, panel, kRowScaleAlignment));
  return all;
}

template <class T>
void quantize_rows(const RowScaleArgs& args, const Panels& panels, int64_t covered,
                   const Exec& exec) {
  constexpr int64_t kGrain = 16;  // rows; a row is a few kilobytes
  const auto kernel = pick_isa("quantize_row_scale", exec, MOXIE_EACH_ISA(row_scale_row<T>));
  const RowScaleOperand& out = *args.rowwise;
  const auto* x = static_cast<const T*>(args.x.data);
  const int64_t cols = panels.cols, rest = panels.total_rows() - covered;
  clear_bytes(exec, out.qdata.data + covered * cols, rest * cols);
  clear_bytes(exec, out.scale.data + covered, rest * static_cast<int64_t>(sizeof(float)));
  const bool stream = covered * cols >= kStreamBytes;
  parallel_for(exec, covered, kGrain, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (int64_t r = begin; r < end; ++r)
      kernel(x + r * cols, cols, reinterpret_cast<uint8_t*>(out.qdata.data) + r * cols,
             out.scale.data + r, stream, *scratch);
  });
}

template <class T>
void quantize_columns(const RowScaleArgs& args, const Panels& panels, const std::vector<Panel>& all,
                      const Exec& exec) {
  const auto kernel = pick_isa("quantize_row_scale", exec, MOXIE_EACH_ISA(row_scale_strip<T>));
  const RowScaleOperand& out = *args.colwise;
  const auto* x = static_cast<const T*>(args.x.data);
  const int64_t cols = panels.cols, strips = ceil_div<int64_t>(cols, kTileEdge);
  if (!panels.weights) {
    const Panel last = all.empty() ? first_panel() : all.back();
    clear_columns(exec, out.qdata.data, cols,
                  last.padded + round_up<int64_t>(last.rows, kRowScaleAlignment), out.qdata.dim(1));
  }
  const bool stream = panels.total_rows() * cols >= kStreamBytes;
  // A strip is one kTileEdge wide, so that a single panel still has work for several threads.
  parallel_for(exec, panels.count * strips, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (int64_t i = begin; i < end; ++i) {
      const Panel& panel = all[i / strips];
      const int64_t col = i % strips * kTileEdge, width = min<int64_t>(kTileEdge, cols - col);
      float* const scale = out.scale.data + panel.index * cols + col;
      if (panel.rows == 0) {
        for (int64_t c = 0; c < width; ++c) scale[c] = 0;
        continue;
      }
      const RowScalePlace place = colwise_place(panels, panel);
      const Tile<T> strip{{0, col, 0, static_cast<int>(width)}, x + panel.begin * cols + col, cols};
      kernel(strip, panel.rows,
             {reinterpret_cast<uint8_t*>(out.qdata.data) + place.qdata + col * place.stride,
              place.stride,
              panels.weights ? panel.rows : round_up<int64_t>(panel.rows, kRowScaleAlignment),
              scale, stream},
             *scratch);
    }
  });
}

template <class T>
void quantize_as(const RowScaleArgs& args, const Panels& panels, const Exec& exec) {
  const std::vector<Panel> all = list_panels(panels);
  const int64_t covered = all.empty() ? 0 : all.back().begin + all.back().rows;
  if (args.rowwise) quantize_rows<T>(args, panels, covered, exec);
  if (args.colwise) quantize_columns<T>(args, panels, all, exec);
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    quantize_as<bf16>(args, panels, exec);
  else
    quantize_as<float>(args, panels, exec);
}

}  // namespace moxie::cpu
