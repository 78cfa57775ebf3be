// Cuts the panels of x into tiles and distributes them over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "moxie/core/base/parallel.h"
#include "moxie/core/layout/panel.h"
#include "moxie/core/simd/tile.h"

namespace moxie::cpu {

struct WalkArgs {
  Panels panels;
  int64_t alignment = 1;  // as in next_panel()
  int64_t tile_rows = kTileRows;
  int64_t tile_cols = kTileCols;
};

// A tile and its panel.
struct PanelSpan {
  const Panel* panel;
  Span span;
};

class Walk {
 public:
  explicit Walk(const WalkArgs& args) : args_(args) {
    Panel panel = first_panel();
    panels_.reserve(args.panels.count);
    for (int64_t g = 0; g < args.panels.count; ++g) {
      panel = next_panel(args.panels, panel, args.alignment);
      covered_ = panel.begin + panel.rows;
      padded_ = panel.padded + round_up(panel.rows, args.alignment);
      // A panel is cut into bands of tile_rows rows. Colwise groups follow each other in one
      // buffer, so the first band of a panel may be shorter: the other bands then begin at
      // multiples of 128 and fill cache lines.
      const int64_t lead = args.panels.weights ? 0 : panel.padded % args.tile_rows / kUnit;
      panels_.push_back({panel, lead, units_});
      units_ += ceil_div<int64_t>(panel.rows, kUnit);
    }
    const int64_t whole = args.panels.cols / kTileEdge * kTileEdge;
    strips_ = ceil_div(whole, args.tile_cols) + (whole < args.panels.cols);
  }

  int64_t covered_rows() const { return covered_; }  // end of the last group
  // The end of the last group if every panel is padded.
  int64_t padded_rows() const { return padded_; }

  // Calls f(tile, next tile or null) for every tile; each range of work has its own f = make().
  template <class Make>
  void run(const Exec& exec, const Make& make) const {
    const int64_t item = kUnit * min(args_.tile_cols, max<int64_t>(args_.panels.cols, 1));
    const int64_t grain = ceil_div(kGrainElements, item);
    parallel_for(exec, units_ * strips_, grain, [&](int64_t begin, int64_t end) {
      auto f = make();
      std::optional<PanelSpan> last;
      for_each_tile(begin, end, [&](const PanelSpan& tile) {
        if (last) f(*last, &tile);
        last = tile;
      });
      if (last) f(*last, static_cast<const PanelSpan*>(nullptr));
    });
  }

 private:
  // Work is counted in items: an item is kUnit rows of a strip, a strip is tile_cols columns. So
  // one large group as well as a thousand small ones are divided evenly over threads.
  static constexpr int64_t kUnit = 16;
  static constexpr int64_t kGrainElements = 1 << 16;  // some 20 microseconds

  struct Planned {
    Panel panel;
    int64_t lead;   // units by which the first band is shorter
    int64_t first;  // first unit
  };

  // Calls f for the tiles whose first item is in [begin, end). A band of n units (kUnit rows each)
  // and s strips has n * s items, counted strip by strip.
  template <class F>
  void for_each_tile(int64_t begin, int64_t end, const F& f) const {
    const int64_t band = args_.tile_rows / kUnit, unit = begin / strips_;
    auto p = std::upper_bound(panels_.begin(), panels_.end(), unit,
                              [](int64_t u, const Planned& planned) { return u < planned.first; });
    for (--p; p != panels_.end(); ++p) {
      const int64_t units = ceil_div<int64_t>(p->panel.rows, kUnit);
      int64_t at = max<int64_t>(unit - p->first, 0);
      at = max<int64_t>((at + p->lead) / band * band - p->lead, 0);
      for (int64_t stop; at < units; at = stop) {
        stop = min(round_up(at + p->lead + 1, band) - p->lead, units);
        const int64_t item = (p->first + at) * strips_, step = stop - at;
        if (item >= end) return;
        int64_t strip = ceil_div(max<int64_t>(begin - item, 0), step);
        for (; strip < strips_ && item + strip * step < end; ++strip)
          f({&p->panel, span(strip, at * kUnit, min(stop * kUnit, p->panel.rows) - at * kUnit)});
      }
    }
  }

  Span span(int64_t strip, int64_t row, int64_t rows) const {
    const int64_t cols = args_.panels.cols, whole = cols / kTileEdge * kTileEdge;
    const int64_t begin = min(strip * args_.tile_cols, whole);
    const int64_t end = begin < whole ? min(begin + args_.tile_cols, whole) : cols;
    return {row, begin, static_cast<int>(rows), static_cast<int>(end - begin)};
  }

  WalkArgs args_;
  std::vector<Planned> panels_;
  int64_t units_ = 0, strips_ = 0, covered_ = 0, padded_ = 0;
};

}  // namespace moxie::cpu
