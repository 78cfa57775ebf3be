// The walk over tiles that all quantizing ops of the cpu backend share.
#pragma once

#include <memory>

#include "moxie/core/quantize/quantize.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {

// Where a panel's rowwise and colwise forms go; either may be null.
struct Targets {
  const Target *rowwise, *colwise;
};

// Calls f(tile, next tile or null, targets, state) for every tile of a group, and zeroes what no
// group covers. Each thread's range of work has its own State, whose member `tile` is a Scratch.
template <class State, class F>
void quantize_tiles(const QuantizeForms& forms, const WalkArgs& args, const Exec& exec,
                    const F& f) {
  const Panels& panels = args.panels;
  const Walk walk(args);
  if (forms.rowwise) clear_rest(exec, *forms.rowwise, Form::kRowwise, panels, walk);
  if (forms.colwise) clear_rest(exec, *forms.colwise, Form::kColwise, panels, walk);
  const bool stream = panels.total_rows() * panels.cols >= kStreamBytes;
  const auto target_of = [&](const std::optional<QuantizedOut>& out, Form form,
                             const Panel& panel) {
    if (!out) return Target{};
    return Target{form,
                  out->block,
                  out->layout,
                  out->qdata.data,
                  out->scale.data,
                  stream,
                  place_of(panels, panel, form, out->block, out->layout)};
  };
  walk.run(exec, [&] {
    return [&, state = std::make_unique_for_overwrite<State>()](const PanelSpan& tile,
                                                                const PanelSpan* next) {
      const Target rowwise = target_of(forms.rowwise, Form::kRowwise, *tile.panel);
      const Target colwise = target_of(forms.colwise, Form::kColwise, *tile.panel);
      f(tile, next, Targets{forms.rowwise ? &rowwise : nullptr, forms.colwise ? &colwise : nullptr},
        *state);
    };
  });
}

inline int64_t alignment_of(const QuantizeForms& forms) {
  return forms.colwise ? forms.colwise->block.rows : 1;
}

// A tile of intermediate values that no tensor holds. In bf16 the stride is an odd number of cache
// lines, so that rows map to different cache sets.
template <class T>
struct ValueScratch {
  static constexpr int kStride = kTileCols + 96;
  Scratch tile;
  alignas(64) T values[kTileRows * kStride];

  T* row(int r) { return values + r * kStride; }
  Tile<T> of(const Span& span) const { return {span, values, kStride, nullptr, 0}; }
};

}  // namespace moxie::cpu
