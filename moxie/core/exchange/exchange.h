// Expert parallelism over shared memory: tokens to the ranks of their experts and rows back,
// without the host. Ranks hold the experts in order, each as many. Rows of an expert are in order
// of rank, then token, which is the order that one process with all tokens would have.
//
// Every rank calls the same ops in the same order, each rank's in order of one stream:
//
//   forward:  exchange_places, send_tokens(x), receive_pairs, gather_rows, .., send_rows, combine
//
//   backward: send_bias, send_tokens(dy), receive_bias, gather_rows, .., send_rows, combine
//
// With send_quantized for send_tokens, tokens are quantized on their way.
// exchange_places and both sends end with a barrier of all ranks, so what a rank writes for the
// next step is not read by a peer that is still at the one before (docs/kernels/exchange.md).
//
// After a failure (shared_memory.h) no barrier waits, nothing is sent, and results are NaN.
#pragma once

#include <optional>

#include "moxie/core/exchange/shared_memory.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/layout/wire.h"

namespace moxie {

// Bounds of one call, equal on all ranks: rows of a rank's experts and tokens that a rank receives.
struct ExchangeLimits {
  int64_t rows = 0, tokens = 0;
};

// Where this rank's pairs go, by slot, int32 [3, T * k]: the expert; the row at its rank; the
// token's place among the tokens that the rank receives. A token goes to a rank once: in its later
// slots of that rank the place is -1 - place.
enum class SlotPlace : int64_t { kExpert, kRow, kToken };

// What a rank's experts get, int32 [3 * local experts + 3]: the ends of their rows; the begins and
// the ends of those rows that are of this rank's own tokens; the number of tokens received, and the
// begin and the end of the own ones among them.
constexpr int64_t expert_places(int64_t local_experts) { return 3 * local_experts + 3; }

// Tokens that one CTA counts: one per thread.
inline constexpr int64_t kExchangePiece = 256;
// Size in int32 of the cuda backend's workspace: tokens by destination in each piece; the place of
// this rank's first token at each rank; what to add to a row of `row_of`, by expert.
constexpr int64_t exchange_workspace(int64_t tokens, int64_t ranks, int64_t experts) {
  return ranks * (ceil_div(tokens, kExchangePiece) + 1) + experts;
}

// Counts go to all ranks, and every rank finds the places. Weights travel with the pairs. If a rank
// gets more than the limits, every rank fails; if signatures differ, too.
struct ExchangePlacesArgs {
  const SharedMemory& memory;
  ExchangeLimits limits;
  View<const int32_t> offs;    // [E], the route of this rank's tokens
  View<const int32_t> row_of;  // [T * k]
  View<const float> weights;   // [T, k]
  int32_t signature = 0;
  View<int32_t> slots;      // result, [3, T * k]
  View<int32_t> experts;    // result, [expert_places(E / ranks)]
  View<int32_t> own;        // result, [T]: the own tokens that this rank receives, in order
  View<int32_t> workspace;  // cuda: [exchange_workspace()]; may be empty elsewhere
};
void exchange_places(const ExchangePlacesArgs& args, const Exec& exec);

// Elements and, if quantized, their scales, as bytes: rows of one matrix each.
template <class Byte>
struct RowBytes {
  View<Byte> data;   // [rows, bytes of a row]
  View<Byte> scale;  // likewise; no columns without scales
};

// Every token goes once to each other rank that has experts of it. A rank reads its own where they
// are.
struct SendTokensArgs {
  const SharedMemory& memory;
  ExchangeLimits limits;
  RowBytes<const std::byte> tokens;  // [T, ..]
  View<const int32_t> slots;         // [3, T * k]
  Step step = Step::kX;
};
void send_tokens(const SendTokensArgs& args, const Exec& exec);

// The same for tokens that are quantized on their way, with a scale for each block of a row. Rows
// that no expert of this rank needs may be left as they are in `tokens`.
struct SendQuantizedArgs {
  const SharedMemory& memory;
  ExchangeLimits limits;
  ConstFloatView x;           // [T, D]
  View<const int32_t> slots;  // [3, T * k]
  Step step = Step::kX;
  ScaleRule rule = ScaleRule::kRceil;
  QuantizedOut tokens;  // result, rowwise with plain scales: [T, D] and [T, D / block]
};
void send_quantized(const SendQuantizedArgs& args, const Exec& exec);

// The pairs as they came, out of the shared memory: for each row of the experts its token and its
// weight. Past the last row both are 0.
struct ReceivePairsArgs {
  const SharedMemory& memory;
  ExchangeLimits limits;
  View<const int32_t> experts;  // [expert_places()]
  View<int32_t> row_token;      // result, [limits.rows]
  View<float> row_weight;       // result, [limits.rows]
};
void receive_pairs(const ReceivePairsArgs& args, const Exec& exec);

// rows[r] = tokens[row_token[r]] up to the last row of the experts; without row_token the tokens
// received, in order. Rows past the last keep their bytes.
struct GatherRowsArgs {
  const SharedMemory& memory;
  RowBytes<const std::byte>
      tokens;  // [T, ..], as given to send_tokens; or kept, [limits.tokens, ..]
  // Of tokens that were sent, those of this rank; the others' lie in the shared memory. Absent: all
  // of `tokens` are those received.
  std::optional<View<const int32_t>> own = std::nullopt;        // [T]
  View<const int32_t> experts;                                  // [expert_places()]
  std::optional<View<const int32_t>> row_token = std::nullopt;  // [limits.rows]
  RowBytes<std::byte> rows = {};                                // result
};
void gather_rows(const GatherRowsArgs& args, const Exec& exec);

// Leaves rows of the experts where the ranks of their tokens read them. Rows of own tokens stay
// where they are: combine reads them there.
struct SendRowsArgs {
  const SharedMemory& memory;
  View<const int32_t> experts;                               // [expert_places()]
  std::optional<ConstFloatView> rows = std::nullopt;         // [limits.rows, D]
  std::optional<View<const float>> of_pairs = std::nullopt;  // [limits.rows]
  Step step = Step::kY;
};
void send_rows(const SendRowsArgs& args, const Exec& exec);

//   x[t] = sum over j of weights[t, j] * (row of slot t * k + j)       as unpermute (permute.h)
//   of_slots[t, j] = value of that row
struct CombineArgs {
  const SharedMemory& memory;
  ExchangeLimits limits;
  View<const int32_t> slots;                                 // [3, T * k]
  std::optional<ConstFloatView> rows = std::nullopt;         // as given to send_rows
  std::optional<View<const float>> of_pairs = std::nullopt;  // likewise
  std::optional<View<const float>> weights = std::nullopt;   // [T, k]; absent: all 1
  FloatView x = {};                                          // result, [T, D], with rows
  View<float> of_slots = {};                                 // result, [T, k], with of_pairs
};
void combine(const CombineArgs& args, const Exec& exec);

// b2, the bias of the experts' results, takes part in backward where the tokens are: every rank
// needs b2 of all experts, and the rank of an expert needs, for the gradient, a sum from every
// rank. send_bias leaves both where peers read them behind the barrier of dy. b2, or sums, may have
// no rows, on all ranks alike.
struct SendBiasArgs {
  const SharedMemory& memory;
  View<const std::byte> b2;  // [local experts, bytes of a row], or no rows
  View<const float> sums;    // [experts, D], or no rows
};
void send_bias(const SendBiasArgs& args, const Exec& exec);

struct ReceiveBiasArgs {
  const SharedMemory& memory;
  View<std::byte> b2;  // result, [experts, bytes of a row], or no rows
  View<float> sums;    // result, [ranks * local experts, D]: of this rank's experts, rank by rank
};
void receive_bias(const ReceiveBiasArgs& args, const Exec& exec);

}  // namespace moxie
