#include "moxie/core/base/parallel.h"
#include "moxie/core/quantize/quantize_tiles.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/swiglu/backends.h"

#define MOXIE_ISA_BODY "moxie/core/swiglu/swiglu_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

// Rows per range of work: 16k elements, below which waking a thread costs more than it saves.
int64_t grain_of(int64_t width) { return max<int64_t>(1, (16 << 10) / max<int64_t>(width, 1)); }

float weight_of(const RowWeights* of, int64_t row) {
  return of ? of->weights.data[of->slot_of.data[row]] : 1.f;
}

const RowWeights* pointer_to(const std::optional<RowWeights>& weights) {
  return weights ? &*weights : nullptr;
}
const RowWeights* pointer_to(const std::optional<WeightGradient>& weights) {
  return weights ? &weights->of : nullptr;
}

// The weights of a tile's rows.
struct TileWeights {
  float data[kTileRows];

  TileWeights(const RowWeights* of, const PanelSpan& tile) {
    for (int r = 0; r < tile.span.rows; ++r)
      data[r] = weight_of(of, tile.panel->begin + tile.span.row + r);
  }
};

template <class Glu, class T = ElementOf<Glu>>
void swiglu_as(const SwigluArgs& args, const Exec& exec) {
  const auto kernel = pick_isa("swiglu", exec, MOXIE_EACH_ISA(swiglu_row<Glu>));
  const int64_t width = args.a.dim(1);
  parallel_for(exec, args.a.dim(0), grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      kernel(static_cast<const T*>(args.h.data) + r * 2 * width, width,
             weight_of(pointer_to(args.weights), r), static_cast<T*>(args.a.data) + r * width);
  });
}

// Computes dweights: 0 for rows from `covered` on, which no group covers.
template <class Glu, class T = ElementOf<Glu>>
void weight_gradient_as(const WeightGradient& to, const ConstFloatView& da, const ConstFloatView& h,
                        int64_t covered, const Exec& exec) {
  const auto kernel = pick_isa("swiglu_backward", exec, MOXIE_EACH_ISA(weight_gradient<Glu>));
  const int64_t width = da.dim(1);
  parallel_for(exec, da.dim(0), grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      to.dweights.data[to.of.slot_of.data[r]] =
          r < covered ? kernel(static_cast<const T*>(da.data) + r * width,
                               static_cast<const T*>(h.data) + r * 2 * width, width)
                      : 0.f;
  });
}

template <class Glu, class T = ElementOf<Glu>>
void swiglu_backward_as(const SwigluBackwardArgs& args, const Exec& exec) {
  const auto kernel = pick_isa("swiglu_backward", exec, MOXIE_EACH_ISA(swiglu_backward_row<Glu>));
  const int64_t width = args.da.dim(1);
  parallel_for(exec, args.da.dim(0), grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      kernel(static_cast<const T*>(args.da.data) + r * width,
             static_cast<const T*>(args.h.data) + r * 2 * width, width,
             weight_of(pointer_to(args.weights), r), static_cast<T*>(args.dh.data) + r * 2 * width);
  });
  if (args.weights) weight_gradient_as<Glu>(*args.weights, args.da, args.h, args.da.dim(0), exec);
}

template <class Glu, class T = ElementOf<Glu>>
void swiglu_quantize_as(const SwigluQuantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("swiglu_quantize", exec, MOXIE_EACH_ISA(swiglu_quantize_tile<Glu>));
  const int64_t width = panels.cols;
  quantize_tiles<ValueScratch<T>>(
      args.forms, {.panels = panels, .alignment = alignment_of(args.forms)}, exec,
      [&](const PanelSpan& tile, const PanelSpan*, const Targets& to, ValueScratch<T>& scratch) {
        const TileWeights weights(pointer_to(args.weights), tile);
        kernel(static_cast<const T*>(args.h.data) + tile.panel->begin * 2 * width, width,
               weights.data, tile.span, args.forms.rule, to, scratch);
      });
}

template <class Glu, class T = ElementOf<Glu>>
void swiglu_backward_quantize_as(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                                 const Exec& exec) {
  const auto kernel = pick_isa("swiglu_backward_quantize", exec,
                               MOXIE_EACH_ISA(swiglu_backward_quantize_tile<Glu>));
  const int64_t width = panels.cols / 2;
  quantize_tiles<ValueScratch<T>>(
      args.forms, {.panels = panels, .alignment = alignment_of(args.forms)}, exec,
      [&](const PanelSpan& tile, const PanelSpan*, const Targets& to, ValueScratch<T>& scratch) {
        const TileWeights weights(pointer_to(args.weights), tile);
        kernel(static_cast<const T*>(args.da.data) + tile.panel->begin * width,
               static_cast<const T*>(args.h.data) + tile.panel->begin * 2 * width, width,
               weights.data, tile.span, args.forms.rule, to, scratch);
      });
  if (args.weights)
    weight_gradient_as<Glu>(*args.weights, args.da, args.h, covered_rows(args), exec);
}

}  // namespace

void swiglu(const SwigluArgs& args, const Exec& exec) {
  with_glu(args.h.format, args.activation, [&]<class Glu>() { swiglu_as<Glu>(args, exec); });
}

void swiglu_backward(const SwigluBackwardArgs& args, const Exec& exec) {
  with_glu(args.h.format, args.activation,
           [&]<class Glu>() { swiglu_backward_as<Glu>(args, exec); });
}

void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, const Exec& exec) {
  with_glu(args.h.format, args.activation,
           [&]<class Glu>() { swiglu_quantize_as<Glu>(args, panels, exec); });
}

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              const Exec& exec) {
  with_glu(args.h.format, args.activation,
           [&]<class Glu>() { swiglu_backward_quantize_as<Glu>(args, panels, exec); });
}

}  // namespace moxie::cpu
