#include <memory>

#include "moxie/core/dequantize/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/walk.h"

#define MOXIE_ISA_BODY "moxie/core/dequantize/dequantize_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

template <class T>
void dequantize_as(const DequantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("dequantize", exec, MOXIE_EACH_ISA(dequantize_tile<T>));
  const bool rowwise = args.form == Form::kRowwise;
  const Walk walk({.panels = panels, .alignment = rowwise ? 1 : args.block.rows});
  auto* const x = static_cast<T*>(args.x.data);
  const int64_t covered = panels.weights ? panels.total_rows() : walk.covered_rows();
  clear_bytes(exec, x + covered * panels.cols,
              (panels.total_rows() - covered) * panels.cols * static_cast<int64_t>(sizeof(T)));
  walk.run(exec, [&] {
    return [&, scratch = std::make_unique_for_overwrite<Scratch>()](const Panel& panel,
                                                                    const Span& span) {
      const Place place = place_of(panels, panel, args.form, args.block, ScaleLayout::kPlain);
      const Source in{args.form, args.block,
                      reinterpret_cast<const uint8_t*>(args.qdata.data) + place.qdata,
                      args.scale.data + place.scale, place};
      kernel(span, in, x + (panel.begin + span.row) * panels.cols + span.col, panels.cols,
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
