// dispatch and combine: the two exchanges of an expert-parallel layer. Each is the other's
// backward: tokens to the experts' ranks (x, then dy), and rows of the experts back (y, then dx).
//
// Messages have the format of core/layout/wire.h, one per rank, as bytes: process groups do not
// know FP8.
#pragma once

#include "moxie/core/layout/wire.h"
#include "moxie/torch/exchange/places.h"

namespace moxie::ops {

struct DispatchArgs {
  const Group& group;
  const Places& places;
  const Quantized& tokens;  // [T, D], with plain scales [T, D / block] or without
  const char* what;         // x or dy, for errors
};
struct Weights {
  const Tensor& of_slots;  // f32 [T, k]
  const Tensor& slot_of;   // int32 [R]
};
struct Dispatched {
  Quantized tokens;  // those received: [in tokens, D]
  // With weights, for each row of the experts:
  Tensor token_of;  // int64 [in pairs]
  Tensor weights;   // f32 [in pairs]
};
Dispatched dispatch_tokens(const DispatchArgs& args, const std::optional<Weights>& weights);

struct CombineArgs {
  const Group& group;
  const Places& places;
  const Tensor& rows;      // [in pairs, D], of the experts; undefined where only of_pairs is sent
  const Tensor& of_pairs;  // f32 [in pairs], a value per row, or undefined
  const char* what;        // y or dx
};
struct Combined {
  Tensor rows;      // [R, D] in the order of route
  Tensor of_pairs;  // f32 [R]
};
Combined combine_rows(const CombineArgs& args);

}  // namespace moxie::ops
