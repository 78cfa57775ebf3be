#include "moxie/core/quantize/backends.h"
#include "moxie/core/quantize/quantize_tiles.h"
#include "moxie/core/simd/pick_isa.h"
//
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

struct State {
  Scratch tile;
};

template <class T>
void quantize_as(const QuantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("quantize", exec, MOXIE_EACH_ISA(quantize_tile<T>));
  const bool rows_alone = !args.colwise && args.rowwise->block.rows == 1;
  const QuantizeForms forms = forms_of(args);
  const auto* x = static_cast<const T*>(args.x.data);
  const auto at = [&](const PanelSpan& tile) {
    return x + (tile.panel->begin + tile.span.row) * panels.cols + tile.span.col;
  };
  quantize_tiles<State>(
      forms,
      {.panels = panels,
       .alignment = alignment_of(forms),
       .tile_rows = rows_alone ? kRowTileRows : kTileRows,
       .tile_cols = rows_alone ? kRowTileCols : kTileCols},
      exec, [&](const PanelSpan& tile, const PanelSpan* next, const Targets& to, State& state) {
        kernel({tile.span, at(tile), panels.cols, next ? at(*next) : nullptr, panels.cols},
               args.rule, to.rowwise, to.colwise, state.tile);
      });
}

}  // namespace

void quantize(const QuantizeArgs& args, const Panels& panels, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    quantize_as<bf16>(args, panels, exec);
  else
    quantize_as<float>(args, panels, exec);
}

}  // namespace moxie::cpu
