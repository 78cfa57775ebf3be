#include <memory>

#include "moxie/core/dequantize/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/plain_scales.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {
namespace {

template <class T>
struct DequantizeTo {
  T* x;  // the tile's first element
  int64_t stride;
  bool stream;
  const uint8_t* next;  // the next tile in qdata, to prefetch; may be null
};

struct DequantizeScratch {
  Scratch tile;
  alignas(64) uint8_t row[(kTileCols + 64) * sizeof(float)];
  TileCodes codes;
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/dequantize/dequantize_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

template <class T>
void dequantize_as(const DequantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("dequantize", exec, MOXIE_EACH_ISA(dequantize_tile<T>));
  const bool rowwise = args.form == Form::kRowwise;
  const Walk walk({.panels = panels,
                   .alignment = rowwise ? 1 : args.block.rows,
                   .tile_rows = rowwise ? kRowTileRows : kTileRows,
                   .tile_cols = rowwise ? kRowTileCols : kTileCols});
  auto* const x = static_cast<T*>(args.x.data);
  const int64_t covered = panels.weights ? panels.total_rows() : walk.covered_rows();
  clear_bytes(exec, x + covered * panels.cols,
              (panels.total_rows() - covered) * panels.cols * static_cast<int64_t>(sizeof(T)));
  const bool stream =
      panels.total_rows() * panels.cols * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;

  const auto source = [&](const PanelSpan& tile) -> Source {
    const Place place = place_of(panels, *tile.panel, args.form, args.block, args.layout);
    return {args.form, args.block, reinterpret_cast<const uint8_t*>(args.qdata.data) + place.qdata,
            args.scale.data + place.scale, place};
  };
  const auto first_byte = [&](const PanelSpan& tile) {
    const Source in = source(tile);
    const int64_t outer = rowwise ? tile.span.row : tile.span.col;
    const int64_t k = rowwise ? tile.span.col : tile.span.row;
    return in.qdata + outer * in.place.qdata_stride + k;
  };
  walk.run(exec, [&] {
    return [&, scratch = std::make_unique_for_overwrite<DequantizeScratch>()](
               const PanelSpan& tile, const PanelSpan* next) {
      T* const to = x + (tile.panel->begin + tile.span.row) * panels.cols + tile.span.col;
      const SourceTile from =
          with_plain_scales(tile.span, source(tile), args.layout, scratch->codes);
      kernel(from.span, from.in, {to, panels.cols, stream, next ? first_byte(*next) : nullptr},
             *scratch);
    };
  });
}

}  // namespace

void dequantize(const DequantizeArgs& args, const Panels& panels, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    dequantize_as<bf16>(args, panels, exec);
  else
    dequantize_as<float>(args, panels, exec);
}

}  // namespace moxie::cpu
