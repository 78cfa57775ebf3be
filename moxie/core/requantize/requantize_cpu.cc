#include <memory>

#include "moxie/core/requantize/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {
namespace {

// The tile in f32 has to fit beside the quantized one, so it is narrower than others. Its rows are
// an odd number of cache lines apart, so that they share no cache set.
constexpr int kF32Cols = 512;
constexpr int kF32Stride = kF32Cols + 16;

struct RequantizeScratch {
  alignas(64) float tile[kTileRows * kF32Stride];
  Scratch scratch;
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/requantize/requantize_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {

void requantize(const RequantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("requantize", exec, MOXIE_EACH_ISA(requantize_tile));
  const Operand& out = args.colwise;
  const Walk walk({.panels = panels,
                   .alignment = out.block.rows,
                   .tile_cols = kF32Cols,
                   .order = Order::kDown});
  clear_rest(exec, out, Form::kColwise, panels, walk);
  const bool stream = panels.total_rows() * panels.cols >= kStreamBytes;
  walk.run(exec, [&] {
    return [&, stream, scratch = std::make_unique_for_overwrite<RequantizeScratch>()](
               const Panel& panel, const Span& span) {
      const Place from = place_of(panels, panel, Form::kRowwise, args.block, ScaleLayout::kPlain);
      const Source in{Form::kRowwise, args.block,
                      reinterpret_cast<const uint8_t*>(args.qdata.data) + from.qdata,
                      args.scale.data + from.scale, from};
      const Target to{Form::kColwise,
                      out.block,
                      out.layout,
                      out.qdata.data,
                      out.scale.data,
                      stream,
                      place_of(panels, panel, Form::kColwise, out.block, out.layout)};
      kernel(span, in, args.rule, to, scratch->tile, scratch->scratch);
    };
  });
}

}  // namespace moxie::cpu
