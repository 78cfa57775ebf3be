// Cuts the panels of x into tiles and spreads them over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moxie/core/base/parallel.h"
#include "moxie/core/layout/panel.h"
#include "moxie/core/simd/tile.h"

namespace moxie::cpu {

enum class Order : uint8_t {
  kAcross,  // the strips of a band of rows, then the next band: for results in the order of x
  kDown,    // the bands of a strip of columns: for transposed results, whose pages stay known
};

struct WalkArgs {
  Panels panels;
  int64_t alignment = 1;  // next_panel()'s
  int64_t tile_cols = kTileCols;
  Order order = Order::kAcross;
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
      // Colwise groups lie side by side: a short first band puts the others at multiples of 128,
      // where they fill cache lines.
      const int64_t lead = args.panels.weights ? 0 : panel.padded % kTileRows / kUnit;
      panels_.push_back({panel, lead, units_});
      units_ += ceil_div<int64_t>(panel.rows, kUnit);
    }
    const int64_t whole = args.panels.cols / kTileEdge * kTileEdge;
    strips_ = ceil_div(whole, args.tile_cols) + (whole < args.panels.cols);
  }

  int64_t covered_rows() const { return covered_; }  // rows after these are in no group
  int64_t padded_rows() const { return padded_; }    // end of the last panel, each padded

  // f(panel, span) once for every tile; every range of work makes its own f = make().
  template <class Make>
  void run(const Exec& exec, const Make& make) const {
    const int64_t count = units_ * strips_;
    parallel_for(exec, count, kGrain, [&](int64_t begin, int64_t end) {
      auto f = make();
      if (args_.order == Order::kDown) {
        for (int64_t i = begin; i < end;) {
          const int64_t strip = i / units_, first = i % units_;
          const int64_t last = min(units_, first + end - i);
          walk_bands(first, last, [&](const Planned& p, int64_t row, int64_t rows) {
            tile(strip, p, row, rows, f);
          });
          i += last - first;
        }
      } else {
        walk_bands(begin / strips_, end / strips_,
                   [&](const Planned& p, int64_t row, int64_t rows) {
                     for (int64_t s = 0; s < strips_; ++s) tile(s, p, row, rows, f);
                   });
      }
    });
  }

 private:
  // Work is counted in runs of 32 rows, so that neither one large group nor a thousand small ones
  // end up in one thread.
  static constexpr int64_t kUnit = 32;
  static constexpr int64_t kGrain = 4;

  struct Planned {
    Panel panel;
    int64_t lead;   // units by which the first band is short
    int64_t first;  // unit
  };

  // The bands that begin in units [begin, end).
  template <class F>
  void walk_bands(int64_t begin, int64_t end, const F& f) const {
    constexpr int64_t kBand = kTileRows / kUnit;
    auto next = std::upper_bound(panels_.begin(), panels_.end(), begin,
                                 [](int64_t unit, const Planned& p) { return unit < p.first; });
    for (auto p = next - 1; p != panels_.end() && p->first < end; ++p) {
      const int64_t units = ceil_div<int64_t>(p->panel.rows, kUnit);
      int64_t at = max<int64_t>(begin - p->first, 0);
      if (at > 0) at = round_up(at + p->lead, kBand) - p->lead;
      while (at < units && p->first + at < end) {
        const int64_t stop = min(round_up(at + p->lead + 1, kBand) - p->lead, units);
        f(*p, at * kUnit, min(stop * kUnit, p->panel.rows) - at * kUnit);
        at = stop;
      }
    }
  }

  template <class F>
  void tile(int64_t strip, const Planned& p, int64_t row, int64_t rows, F& f) const {
    const int64_t cols = args_.panels.cols, whole = cols / kTileEdge * kTileEdge;
    const int64_t begin = min(strip * args_.tile_cols, whole);
    const int64_t end = begin < whole ? min(begin + args_.tile_cols, whole) : cols;
    f(p.panel, Span{row, begin, static_cast<int>(rows), static_cast<int>(end - begin)});
  }

  WalkArgs args_;
  std::vector<Planned> panels_;
  int64_t units_ = 0, strips_ = 0, covered_ = 0, padded_ = 0;
};

}  // namespace moxie::cpu
