// The memory that every rank of an exchange shares with its peers: what lies where in it, and what
// a failure leaves in its status.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"

namespace moxie {

inline constexpr int kMaxRanks = 72;  // the largest NVLink domain

// What a rank's memory has room for; equal on all ranks.
struct Capacity {
  int64_t ranks = 1;
  int64_t experts = 1;      // of all ranks
  int64_t rows = 0;         // of a rank's experts
  int64_t token_bytes = 0;  // the tokens that a rank receives, as they travel
  int64_t row_bytes = 0;    // the results that a rank leaves for its peers
  int64_t bias_bytes = 0;   // b2 of one expert in f32; 0 without biases
};

// Which barrier.
enum class Step : int32_t { kCounts, kX, kY, kDy, kDx };

// The head of the memory, zero at first. A rank counts its barriers; a word with the count it has
// reached, and the step it is at, lies at every peer. A rank that has failed counts no further and
// sets kFailedBit there: peers that are still at an earlier barrier pass it first, and find what it
// found.
struct Meeting {
  uint64_t arrived[kMaxRanks];  // words, written by the peers
  uint64_t passed;              // the word of the last barrier that this rank has passed
  uint64_t failure;             // a Failure, 0 for none; final
};
inline constexpr uint64_t kFailedBit = uint64_t{1} << 63;
inline constexpr int kStepBits = 3;
constexpr uint64_t word_of(uint64_t barrier, Step step) {
  return barrier << kStepBits | static_cast<uint64_t>(step);
}
constexpr uint64_t barrier_of(uint64_t word) { return (word & ~kFailedBit) >> kStepBits; }
constexpr Step step_of(uint64_t word) {
  return static_cast<Step>(word & ((uint64_t{1} << kStepBits) - 1));
}

// What the word of a peer says to a rank that waits at a barrier. Ranks that meet at different
// steps (one went on to its next forward, while the others run backward) must not pass. A word of a
// later barrier hides the step of this one, but the peer that passed it has seen this rank's word.
enum class Word : uint8_t { kEarlier, kArrived, kElsewhere, kFailed };
constexpr Word read_word(uint64_t word, uint64_t own) {
  if (barrier_of(word) == barrier_of(own) && step_of(word) != step_of(own)) return Word::kElsewhere;
  if (barrier_of(word) >= barrier_of(own)) return Word::kArrived;
  return word & kFailedBit ? Word::kFailed : Word::kEarlier;
}

// Counts of a rank, after those of its pairs by expert and of its tokens by rank of destination.
inline constexpr int64_t kCountsAfterRanks = 1;  // the signature of the call

// Offsets in bytes. Each region begins at a multiple of a memory line.
struct Regions {
  int64_t counts = 0;        // int32 [ranks, experts + ranks + kCountsAfterRanks], row r by rank r
  int64_t row_token = 0;     // int32 [rows], written by the peers
  int64_t row_weight = 0;    // f32 [rows], likewise
  int64_t row_gradient = 0;  // f32 [rows], read by the peers
  int64_t tokens = 0;        // written by the peers
  int64_t rows = 0;          // read by the peers
  int64_t b2 = 0;            // of this rank's experts, bias_bytes each; read by the peers
  int64_t b2_sums = 0;       // f32, of all experts, bias_bytes each; read by the peers
  int64_t bytes = 0;         // of all
};
constexpr int64_t counts_of(const Capacity& capacity) {
  return capacity.experts + capacity.ranks + kCountsAfterRanks;
}
constexpr Regions regions_of(const Capacity& capacity) {
  constexpr int64_t kLine = 256;
  Regions at;
  const auto after = [](int64_t begin, int64_t bytes) { return round_up(begin + bytes, kLine); };
  at.counts = after(0, sizeof(Meeting));
  at.row_token = after(at.counts, capacity.ranks * counts_of(capacity) * 4);
  at.row_weight = after(at.row_token, capacity.rows * 4);
  at.row_gradient = after(at.row_weight, capacity.rows * 4);
  at.tokens = after(at.row_gradient, capacity.rows * 4);
  at.rows = after(at.tokens, capacity.token_bytes);
  at.b2 = after(at.rows, capacity.row_bytes);
  at.b2_sums = after(at.b2, capacity.experts / capacity.ranks * capacity.bias_bytes);
  at.bytes = after(at.b2_sums, capacity.experts * capacity.bias_bytes);
  return at;
}

enum class Failure : uint64_t {
  kNone,
  kRows,       // the experts of `rank` got `value` rows, more than `limit`
  kTokens,     // `rank` received `value` tokens, more than `limit`
  kSignature,  // the call of `rank` differs from that of rank 0
  kStalled,    // `rank` did not come to a barrier in time
  kPeer,       // `rank` had failed
  kElsewhere,  // `rank` came to the barrier of step `value` instead
};

// Written once, by the first failure, where the host can read it without waiting for the device;
// `failure` last.
struct Status {
  int64_t failure = 0, step = 0, rank = 0, value = 0, limit = 0;
};
inline constexpr int64_t kStatusFields = 5;
static_assert(sizeof(Status) == kStatusFields * sizeof(int64_t));

struct SharedMemory {
  Capacity capacity;
  int64_t rank = 0;
  std::array<std::byte*, kMaxRanks> base{};  // of every rank, as addresses here
  Status* status = nullptr;                  // in memory that both host and device write
  int64_t timeout_ns = 0;                    // of a barrier
};

}  // namespace moxie
