#include <atomic>
#include <memory>
#include <vector>

#include "moxie/core/row_scale/backends.h"
#include "moxie/core/simd/clear.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {
namespace {

// The place of a panel in the colwise result.
struct RowScaleColumns {
  uint8_t* qdata;
  int64_t stride;
  bool stream;
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/row_scale/row_scale_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

constexpr std::string_view kOp = "quantize_row_scale";

template <class T>
void quantize_rows(const RowScaleArgs& args, const Panels& panels, int64_t covered,
                   const Exec& exec) {
  constexpr int64_t kGrain = 16;  // rows; a row is a few kilobytes
  const auto kernel = pick_isa(kOp, exec, MOXIE_EACH_ISA(row_scale_row<T>));
  const RowScaleOut& out = *args.rowwise;
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

// Raises `most` to `value` if that is larger. Atomic, because the rows of a group are distributed
// over threads.
void raise(int32_t& most, int32_t value) {
  std::atomic_ref<int32_t> shared(most);
  int32_t seen = shared.load(std::memory_order_relaxed);
  while (seen < value && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// Reads x twice, because the scale of a column is known only after the last row of its group.
template <class T>
void quantize_columns(const RowScaleArgs& args, const Panels& panels, const Walk& walk,
                      const Exec& exec) {
  const RowScaleOut& out = *args.colwise;
  const int64_t cols = panels.cols;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto at = [&](const PanelSpan& tile) {
    return x + (tile.panel->begin + tile.span.row) * cols + tile.span.col;
  };
  if (!panels.weights)
    clear_columns(exec, out.qdata.data, cols, walk.padded_rows(), out.qdata.dim(1));

  std::vector<int32_t> amax(panels.count * cols, -1);  // -1: the group is empty
  const auto amax_kernel = pick_isa(kOp, exec, MOXIE_EACH_ISA(row_scale_amax<T>));
  walk.run(exec, [&] {
    return [&, scratch = std::make_unique_for_overwrite<Scratch>()](const PanelSpan& tile,
                                                                    const PanelSpan*) {
      amax_kernel({tile.span, at(tile), cols, nullptr, 0}, *scratch);
      int32_t* const most = amax.data() + tile.panel->index * cols + tile.span.col;
      for (int c = 0; c < tile.span.cols; ++c) raise(most[c], scratch->amax[c]);
    };
  });

  std::vector<float> encode_by(amax.size());
  parallel_for(exec, panels.count * cols, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowScale by = row_scale_of(std::bit_cast<float>(max(amax[i], 0)));
      encode_by[i] = by.encode;
      out.scale.data[i] = amax[i] < 0 ? 0.f : by.decode;
    }
  });

  const auto kernel = pick_isa(kOp, exec, MOXIE_EACH_ISA(row_scale_columns<T>));
  const bool stream = panels.total_rows() * cols >= kStreamBytes;
  walk.run(exec, [&] {
    return [&, scratch = std::make_unique_for_overwrite<Scratch>()](const PanelSpan& tile,
                                                                    const PanelSpan* next) {
      const RowScalePlace place = colwise_place(panels, *tile.panel);
      const int rows = tile.span.rows;
      kernel({tile.span, at(tile), cols, next ? at(*next) : nullptr, cols},
             encode_by.data() + tile.panel->index * cols + tile.span.col,
             panels.weights ? rows : round_up(rows, kRowScaleAlignment),
             {reinterpret_cast<uint8_t*>(out.qdata.data) + place.qdata, place.stride, stream},
             *scratch);
    };
  });
}

template <class T>
void quantize_as(const RowScaleArgs& args, const Panels& panels, const Exec& exec) {
  const Walk walk({.panels = panels, .alignment = kRowScaleAlignment});
  const int64_t covered = panels.weights ? panels.total_rows() : walk.covered_rows();
  if (args.rowwise) quantize_rows<T>(args, panels, covered, exec);
  if (args.colwise) quantize_columns<T>(args, panels, walk, exec);
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, const Exec& exec) {
  if (args.x.format == Format::kBf16)
    quantize_as<bf16>(args, panels, exec);
  else
    quantize_as<float>(args, panels, exec);
}

}  // namespace moxie::cpu
