// Operations on a whole tile of e4m3: transpose it in shared memory, store it, zero it.
#pragma once

#include <type_traits>

#include "moxie/core/ptx/l2.cuh"
#include "moxie/core/tile/source.cuh"

namespace moxie::cuda {

// ---- shared memory ----

// A tile of e4m3 in shared memory, [outer, k] of the colwise form; a line is one index of outer.
// Two access patterns: a fragment accesses 8 bytes in each of 8 lines, with neighbouring lanes 8
// lines apart; global memory is accessed 16 bytes along a line. The xor swizzle keeps both free of
// bank conflicts.
struct alignas(16) ByteTile {
  uint8_t byte[kTileCols][kTileRows];

  // The eight bytes of this thread's fragment in line i of the fragment.
  __device__ uint2& piece(int i) {
    const int index = fragment_row() / kFragment ^ fragment_col() / kFragment;
    return *reinterpret_cast<uint2*>(byte[fragment_col() + i] + index * sizeof(uint2));
  }
  __device__ uint4 load(int line, int index) const {
    const uint4 both = chunk(line, index);
    return line / kFragment % 2 ? uint4{both.z, both.w, both.x, both.y} : both;
  }
  __device__ void store(int line, int index, const uint4& v) {
    const_cast<uint4&>(chunk(line, index)) = line / kFragment % 2 ? uint4{v.z, v.w, v.x, v.y} : v;
  }
  // Does what store() does, but with 16 bytes from global memory and asynchronously (cp.async).
  __device__ void copy(int line, int index, const e4m3* from) {
    auto* const halves = reinterpret_cast<uint2*>(&const_cast<uint4&>(chunk(line, index)));
    const int first = line / kFragment % 2;
    ptx::copy_async_8(halves + first, from);
    ptx::copy_async_8(halves + 1 - first, from + sizeof(uint2));
  }

 private:
  __device__ const uint4& chunk(int line, int index) const {
    return *reinterpret_cast<const uint4*>(byte[line] +
                                           (index ^ line / kFragment / 2) * sizeof(uint4));
  }
};
static_assert(kTileRows / kFragment == kFragmentLanes);

// Stores this thread's fragment in `tile`: eight bytes of each column, four rows per word. Rows
// from `left` on are padding and become zero, even if a scale is NaN.
template <class Tile>
__device__ void store_columns(Tile& tile, int left, uint32_t (&piece)[kFragment][2]) {
  if (left < kFragment) {
    const auto bytes_below = [](int count) {
      return count >= 4 ? ~0u : count <= 0 ? 0u : (1u << (8 * count)) - 1;
    };
#pragma unroll
    for (auto& [low, high] : piece) {
      low &= bytes_below(left);
      high &= bytes_below(left - 4);
    }
  }
#pragma unroll
  for (int j = 0; j < kFragment; ++j) tile.piece(j) = uint2{piece[j][0], piece[j][1]};
}

// Encodes this thread's fragment and stores it transposed in `tile`. scaled(i, x) must write row i,
// scaled, to x.
template <class Tile, class Scaled>
__device__ void transpose_rows(Tile& tile, int left, Scaled&& scaled) {
  uint32_t piece[kFragment][2] = {};
#pragma unroll
  for (int i = 0; i < kFragment; i += 2) {
    float x[2][kFragment];
    scaled(i, x[0]);
    scaled(i + 1, x[1]);
#pragma unroll
    for (int j = 0; j < kFragment; ++j)
      piece[j][i / 4] |= ptx::encode2(x[0][j], x[1][j]) << (8 * (i % 4));
  }
  store_columns(tile, left, piece);
}

template <class Tile, class Element>
__device__ void transpose_fragment(Tile& tile, int left, const Fragment<Element>& fragment,
                                   const Scales<typename Fragment<Element>::AmaxElement>& scales) {
  if constexpr (std::is_same_v<Element, e4m3>) {
    uint32_t factor[kFragment / 2];
    if (fragment.factors(scales, factor)) {
      uint32_t piece[kFragment][2];
#pragma unroll
      for (int i = 0; i < kFragment; i += 4)
#pragma unroll
        for (int j = 0; j < kFragment; j += 4) {
          uint32_t four[4];
#pragma unroll
          for (int k = 0; k < 4; ++k)
            four[k] = ptx::encode_pairs(
                multiply_f16_pairs(fragment.half[i + k][j / 2], factor[j / 2]),
                multiply_f16_pairs(fragment.half[i + k][j / 2 + 1], factor[j / 2 + 1]));
          ptx::transpose_bytes(four);
#pragma unroll
          for (int k = 0; k < 4; ++k) piece[j + k][i / 4] = four[k];
        }
      store_columns(tile, left, piece);
      return;
    }
  }
  transpose_rows(tile, left,
                 [&](int i, float(&x)[kFragment]) { fragment.by_column(i, scales, x); });
}

// ---- where a tile goes ----

// Where one form of a tile is stored: [outer, k] with k contiguous.
struct TileOut {
  e4m3* qdata;  // element (0, 0) of the tile
  int64_t stride;
  int outer, k;  // at most 128 each; k includes the padding at the end of a group
};

// Bytes per store. If the op's tensors are aligned, no piece crosses the end of a row.
inline constexpr int kRowwisePiece = kFragment;
inline constexpr int kColwisePiece = sizeof(uint4);
inline constexpr int kMaxRowBlocks = kTileRows / kMxBlock;

template <bool kAligned, class Word>
__device__ void store_piece(e4m3* to, const Word& word, int count) {
  if constexpr (kAligned) {
    if (count > 0) *reinterpret_cast<Word*>(to) = word;
  } else {
    uint32_t words[sizeof(Word) / 4];
    words[0] = word.x;
    words[1] = word.y;
    if constexpr (sizeof(Word) == 16) {
      words[2] = word.z;
      words[3] = word.w;
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i)
      if (i < count) to[i] = {static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)))};
  }
}

template <bool kAligned>
__device__ uint4 load_piece(const e4m3* from, int count) {
  if constexpr (kAligned) {
    return count > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{};
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kColwisePiece; ++i)
      if (i < count) words[i / 4] |= static_cast<uint32_t>(from[i].bits) << (8 * (i % 4));
    return {words[0], words[1], words[2], words[3]};
  }
}

// for_each_chunk() calls f(line, index of a 16-byte chunk) so that neighbouring threads have
// neighbouring chunks.
inline constexpr int kLineChunks = kTileRows / kColwisePiece;
inline constexpr int kChunkLines = kThreads / kLineChunks;  // lines between a thread's chunks

template <class F>
__device__ void for_each_chunk(F&& f) {
  const int index = threadIdx.x % kLineChunks;
#pragma unroll
  for (int i = 0; i < kTileCols / kChunkLines; ++i)
    f(threadIdx.x / kLineChunks + i * kChunkLines, index);
}

template <bool kAligned>
__device__ void store_tile(const TileOut& out, const ByteTile& tile) {
  const int line = threadIdx.x / kLineChunks, index = threadIdx.x % kLineChunks;
  const int64_t step = kChunkLines * out.stride;
  e4m3* to = out.qdata + line * out.stride + index * kColwisePiece;
#pragma unroll
  for (int i = 0; i < kTileCols; i += kChunkLines, to += step) {
    const int count = line + i < out.outer ? out.k - index * kColwisePiece : 0;
    if constexpr (kAligned) {
      // This is half of a 256-byte L2 line. The tile above or below writes the other half, so the
      // line should stay in L2 until then.
      if (count > 0) ptx::store_kept(to, tile.load(line + i, index));
    } else {
      store_piece<false>(to, tile.load(line + i, index), count);
    }
  }
}

// Zeroes a tile of an operand, one Word per store.
template <bool kAligned, class Word>
__device__ void zero(const TileOut& out) {
  constexpr int kPieces = kTileCols / sizeof(Word);
  const int k = threadIdx.x % kPieces * sizeof(Word);
#pragma unroll 1
  for (int i = threadIdx.x / kPieces; i < out.outer; i += kThreads / kPieces)
    store_piece<kAligned>(out.qdata + i * out.stride + k, Word{}, out.k - k);
}

}  // namespace moxie::cuda
