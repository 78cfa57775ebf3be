// clear_tail, the device function that zeroes padding of wgrad's operands in shared memory, run on
// a CPU.
#include "tests/support/cta_on_host.h"
// Must come after cta_on_host.h.
#include <gtest/gtest.h>

#include <vector>

#include "moxie/core/gemm/clear_tail.cuh"

namespace moxie::testing {
namespace {

using sm90::kTileK;

// The address to which TMA's 128-byte swizzle moves byte k of row r: bits 4 to 6 of the plain
// address are xored with bits 7 to 9.
int address(int r, int k) {
  const int plain = r * kTileK + k;
  return plain ^ (plain >> 7 & 7) << 4;
}

TEST(ClearTail, ZeroesTheBytesOfEveryRowFromTheFirstThatIsPaddingAndNoOther) {
  for (const int rows : {256, 320})
    for (int live = 1; live <= kTileK; ++live) {
      alignas(8) static uint8_t tile[320 * kTileK];
      std::fill(std::begin(tile), std::end(tile), uint8_t{0x7f});
      CtaOnHost::instance().run(2 * cuda::kWarp, LaneOrder::kUp,
                                [&] { sm90::clear_tail(tile, rows, live, cuda::warp_index(), 2); });
      for (int r = 0; r < 320; ++r)
        for (int k = 0; k < kTileK; ++k) {
          const int expected = r < rows && k >= live ? 0 : 0x7f;
          ASSERT_EQ(tile[address(r, k)], expected) << "row " << r << " k " << k << " live " << live;
        }
    }
}

}  // namespace
}  // namespace moxie::testing
