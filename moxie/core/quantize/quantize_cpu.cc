#include <memory>

#include "moxie/core/quantize/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/walk.h"

#define MOXIE_ISA_BODY "moxie/core/quantize/quantize_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

Target target_of(const Operand& out, Form form, bool stream) {
  return {form, out.block, out.layout, out.qdata.data, out.scale.data, stream, {}};
}

template <class T>
void quantize_as(const QuantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("quantize", exec, MOXIE_EACH_ISA(quantize_tile<T>));
  const bool rows_alone = !args.colwise && args.rowwise->block.rows == 1;
  const Walk walk({.panels = panels,
                   .alignment = args.colwise ? args.colwise->block.rows : 1,
                   .tile_rows = rows_alone ? kRowTileRows : kTileRows,
                   .tile_cols = rows_alone ? kRowTileCols : kTileCols});
  if (args.rowwise) clear_rest(exec, *args.rowwise, Form::kRowwise, panels, walk);
  if (args.colwise) clear_rest(exec, *args.colwise, Form::kColwise, panels, walk);

  const bool stream = panels.total_rows() * panels.cols >= kStreamBytes;
  Target rowwise{}, colwise{};
  if (args.rowwise) rowwise = target_of(*args.rowwise, Form::kRowwise, stream);
  if (args.colwise) colwise = target_of(*args.colwise, Form::kColwise, stream);
  const auto* x = static_cast<const T*>(args.x.data);
  const auto at = [&](const PanelSpan& tile) {
    return x + (tile.panel->begin + tile.span.row) * panels.cols + tile.span.col;
  };
  walk.run(exec, [&] {
    return [&, rowwise, colwise, scratch = std::make_unique<Scratch>()](
               const PanelSpan& tile, const PanelSpan* next) mutable {
      if (args.rowwise)
        rowwise.place = place_of(panels, *tile.panel, rowwise.form, rowwise.block, rowwise.layout);
      if (args.colwise)
        colwise.place = place_of(panels, *tile.panel, colwise.form, colwise.block, colwise.layout);
      kernel({tile.span, at(tile), panels.cols, next ? at(*next) : nullptr, panels.cols}, args.rule,
             args.rowwise ? &rowwise : nullptr, args.colwise ? &colwise : nullptr, *scratch);
    };
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
