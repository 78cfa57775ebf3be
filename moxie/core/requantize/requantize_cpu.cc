#include <memory>

#include "moxie/core/requantize/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/plain_scales.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {
namespace {

// Elements from one row of a tile to the next. In bf16 this is an odd number of cache lines, so
// that rows map to different cache sets.
constexpr int kValueStride = kTileCols + 96;

struct RequantizeScratch {
  Scratch tile;
  alignas(64) bf16 bf16s[kTileRows * kValueStride];
  std::unique_ptr<float[]> floats;  // for tiles with values that bf16 cannot hold
  TileCodes codes;
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/requantize/requantize_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {

void requantize(const RequantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("requantize", exec, MOXIE_EACH_ISA(requantize_tile));
  const QuantizedOut& out = args.colwise;
  const Walk walk({.panels = panels, .alignment = out.block.rows});
  clear_rest(exec, out, Form::kColwise, panels, walk);
  const bool stream = panels.total_rows() * panels.cols >= kStreamBytes;
  const auto source = [&](const PanelSpan& tile) -> Source {
    const Place place = place_of(panels, *tile.panel, Form::kRowwise, args.block, args.from_layout);
    return {Form::kRowwise, args.block,
            reinterpret_cast<const uint8_t*>(args.qdata.data) + place.qdata,
            args.scale.data + place.scale, place};
  };
  walk.run(exec, [&] {
    return [&, stream, scratch = std::make_unique_for_overwrite<RequantizeScratch>()](
               const PanelSpan& tile, const PanelSpan* next) {
      const Target to{Form::kColwise,
                      out.block,
                      out.layout,
                      out.qdata.data,
                      out.scale.data,
                      stream,
                      place_of(panels, *tile.panel, Form::kColwise, out.block, out.layout)};
      const uint8_t* ahead = nullptr;
      if (next) ahead = source(*next).qdata + next->span.row * panels.cols + next->span.col;
      const SourceTile from =
          with_plain_scales(tile.span, source(tile), args.from_layout, scratch->codes);
      kernel(from, tile.span, ahead, args.rule, to, *scratch);
    };
  });
}

}  // namespace moxie::cpu
