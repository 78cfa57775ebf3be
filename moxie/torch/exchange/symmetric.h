// The exchange of core/exchange over tensors. The memory that ranks share is made in Python, from
// torch's symmetric memory; threads of one process may share memory of a CPU.
#pragma once

#include <string>

#include "moxie/core/exchange/exchange.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

// As the op takes them.
struct SymmetricArgs {
  Tensor memory;                  // uint8, this rank's
  Tensor status;                  // int64 [kStatusFields], on the host
  std::vector<int64_t> peers;     // by rank, the address of its memory here
  std::vector<int64_t> capacity;  // experts, rows, bytes of tokens, of rows, of an expert's bias
  std::vector<int64_t> limits;    // rows, tokens
  int64_t rank = 0, timeout_ms = 0;
  std::string group;
};

class Symmetric {
 public:
  Symmetric(const char* op, SymmetricArgs args);  // checks them

  int64_t size() const { return memory_.capacity.ranks; }
  int64_t local_experts() const { return memory_.capacity.experts / size(); }
  const ExchangeLimits& limits() const { return limits_; }
  const SymmetricArgs& args() const { return args_; }

  struct Places {
    Tensor slots;                   // int32 [3, T * k]
    Tensor experts;                 // int32 [expert_places()]
    Tensor own;                     // int32 [T]: tokens of this rank that it receives itself
    int64_t tokens = 0, top_k = 1;  // T and k
  };
  Places places(const Tensor& offs, const Tensor& row_of, const Tensor& weights,
                int32_t signature) const;

  // Tokens to the ranks of their experts; behind it every rank has received them.
  void send(const Quantized& tokens, const Places& places, Step step) const;
  // Quantizes them on the way, and returns those of this rank's experts; other rows hold anything.
  Quantized send_quantized(const Tensor& tokens, Block block, ScaleRule rule, const Places& places,
                           Step step) const;
  struct Pairs {
    Tensor token;   // int32 [limits.rows]: of each row of the experts
    Tensor weight;  // f32 [limits.rows]
  };
  Pairs pairs(const Places& places) const;
  // The tokens received, once each, and the rows of the experts: of those tokens, or of tokens that
  // were kept. `sent`: as this rank sent them.
  Quantized received(const Quantized& sent, const Places& places) const;
  Quantized rows(const Quantized& sent, const Places& places, const Tensor& row_token) const;
  Quantized rows_of(const Quantized& kept, const Places& places, const Tensor& row_token) const;

  // Rows of the experts, and a value for each, to the ranks of their tokens: their sum by token.
  struct Results {
    Tensor rows;      // [limits.rows, D], or undefined
    Tensor of_pairs;  // f32 [limits.rows], or undefined
  };
  struct AtTokens {
    Tensor x;         // [T, D]
    Tensor of_slots;  // f32 [T, k]
  };
  AtTokens combine(const Results& results, const Places& places, const OptionalTensor& weights,
                   Step step) const;

  // What b2 needs over ranks; either may be undefined. Call send_bias before send() of dy, and
  // receive_bias behind it.
  struct Bias {
    Tensor b2;    // sent: [local experts, D]; received: [experts, D]
    Tensor sums;  // f32. sent: [experts, D]; received: [ranks, local experts, D]
  };
  void check_bias(const Tensor& b2) const;  // whether the memory has room
  void send_bias(const Bias& own) const;
  Bias receive_bias(const Bias& own) const;

 private:
  enum class Tokens : bool { kSent, kKept };
  Quantized gather(Tokens which, const Quantized& tokens, const OptionalTensor& row_token,
                   const Places& places) const;

  const char* op_;
  SymmetricArgs args_;
  SharedMemory memory_;
  ExchangeLimits limits_;
};

// Raises what the status says, if an exchange has failed. Does not wait for the device.
void check_status(const char* op, const SymmetricArgs& args);

}  // namespace moxie::ops
