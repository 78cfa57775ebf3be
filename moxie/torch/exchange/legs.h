// dispatch and combine, the two exchanges of an expert-parallel layer. dispatch sends tokens to the
// ranks of their experts (x in forward, dy in backward), combine sends rows of the experts back (y,
// then dx). Each is the backward of the other.
//
// Each rank sends one message to every rank, in the format of core/layout/wire.h. Messages are
// bytes, because process groups do not know FP8.
#pragma once

#include "moxie/core/layout/wire.h"
#include "moxie/torch/exchange/places.h"

namespace moxie::ops {

struct DispatchArgs {
  const Group& group;
  const Places& places;
  const Quantized& tokens;  // [T, D]; if quantized, with plain scales [T, D / block]
  const char* what;         // x or dy, for errors
};
struct Weights {
  const Tensor& of_slots;  // f32 [T, k]
  const Tensor& slot_of;   // int32 [R]
};
struct Dispatched {
  Quantized tokens;  // the tokens received, [in tokens, D]
  // If weights were sent, for each row of the experts: the received token that it holds, and its
  // weight.
  Tensor token_of;  // int64 [in pairs]
  Tensor weights;   // f32 [in pairs]
};
Dispatched dispatch_tokens(const DispatchArgs& args, const std::optional<Weights>& weights);

struct CombineArgs {
  const Group& group;
  const Places& places;
  const Tensor& rows;      // [in pairs, D], of the experts; undefined if only of_pairs is sent
  const Tensor& of_pairs;  // f32 [in pairs], a value per row of the experts; or undefined
  const char* what;        // y or dx
};
struct Combined {
  Tensor rows;      // [R, D], in the order of route()
  Tensor of_pairs;  // f32 [R]
};
Combined combine_rows(const CombineArgs& args);

}  // namespace moxie::ops
