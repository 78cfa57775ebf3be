#include <cstring>

#include "moxie/core/base/parallel.h"
#include "moxie/core/permute/backends.h"
#include "moxie/core/quantize/quantize_tiles.h"
#include "moxie/core/simd/pick_isa.h"

#define MOXIE_ISA_BODY "moxie/core/permute/permute_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

// Rows per thread: at least 16k elements, below which waking a thread costs more than it saves.
int64_t grain_of(int64_t dim) { return max<int64_t>(1, (16 << 10) / max<int64_t>(dim, 1)); }

template <class T>
void permute_as(const PermuteArgs& args, const Exec& exec) {
  const auto scale = pick_isa("permute", exec, MOXIE_EACH_ISA(scale_row<T>));
  const int64_t dim = args.x.dim(1);
  const T* const x = static_cast<const T*>(args.x.data);
  T* const rows = static_cast<T*>(args.rows.data);
  parallel_for(exec, args.slot_of.dim(0), grain_of(dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t slot = args.slot_of.data[r];
      const T* from = x + slot / args.top_k * dim;
      if (args.weights)
        scale(from, args.weights->data[slot], dim, rows + r * dim);
      else
        std::memcpy(rows + r * dim, from, dim * sizeof(T));
    }
  });
}

template <class T>
void unpermute_as(const UnpermuteArgs& args, const Exec& exec) {
  const auto kernel = pick_isa("unpermute", exec, MOXIE_EACH_ISA(sum_rows<T>));
  const int64_t tokens = args.x.dim(0), dim = args.x.dim(1);
  if (tokens == 0) return;
  const int64_t k = args.row_of.dim(0) / tokens;
  parallel_for(exec, tokens, grain_of(dim * k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      kernel(static_cast<const T*>(args.rows.data), args.row_of.data + t * k,
             args.weights ? args.weights->data + t * k : nullptr, k, dim,
             static_cast<T*>(args.x.data) + t * dim);
  });
}

template <class T>
void unpermute_weights_as(const UnpermuteWeightsArgs& args, const Exec& exec) {
  const auto dot = pick_isa("unpermute_weights", exec, MOXIE_EACH_ISA(dot_rows<T>));
  const int64_t tokens = args.dout.dim(0), dim = args.dout.dim(1);
  if (tokens == 0) return;
  const int64_t k = args.row_of.dim(0) / tokens;
  parallel_for(exec, tokens * k, grain_of(dim), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot)
      args.dweights.data[slot] =
          dot(static_cast<const T*>(args.dout.data) + slot / k * dim,
              static_cast<const T*>(args.rows.data) + args.row_of.data[slot] * dim, dim);
  });
}

template <class T>
void permute_quantize_as(const PermuteQuantizeArgs& args, const Panels& panels, const Exec& exec) {
  const auto kernel = pick_isa("permute_quantize", exec, MOXIE_EACH_ISA(quantize_tile<T>));
  const auto* x = static_cast<const T*>(args.x.data);
  quantize_tiles<ValueScratch<T>>(
      args.forms, {.panels = panels, .alignment = alignment_of(args.forms)}, exec,
      [&](const PanelSpan& tile, const PanelSpan*, const Targets& to, ValueScratch<T>& scratch) {
        const Span& span = tile.span;
        for (int r = 0; r < span.rows; ++r) {
          const int64_t slot = args.slot_of.data[tile.panel->begin + span.row + r];
          std::memcpy(scratch.row(r), x + slot / args.top_k * panels.cols + span.col,
                      span.cols * sizeof(T));
        }
        kernel(scratch.of(span), args.forms.rule, to.rowwise, to.colwise, scratch.tile);
      });
}

}  // namespace

void permute(const PermuteArgs& args, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    permute_as<bf16>(args, exec);
  else
    permute_as<float>(args, exec);
}

void unpermute(const UnpermuteArgs& args, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    unpermute_as<bf16>(args, exec);
  else
    unpermute_as<float>(args, exec);
}

void unpermute_weights(const UnpermuteWeightsArgs& args, const Exec& exec) {
  if (args.dout.format == Format::kBf16)
    unpermute_weights_as<bf16>(args, exec);
  else
    unpermute_weights_as<float>(args, exec);
}

void permute_quantize(const PermuteQuantizeArgs& args, const Panels& panels, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    permute_quantize_as<bf16>(args, panels, exec);
  else
    permute_quantize_as<float>(args, panels, exec);
}

}  // namespace moxie::cpu
