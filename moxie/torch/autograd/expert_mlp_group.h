// expert_mlp over a process group: tokens are sent to the ranks of their experts and rows come back
// (exchange/legs.h). Each expert sees its rows in the order that they would have in one process.
#pragma once

#include "moxie/torch/autograd/expert_mlp_path.h"
#include "moxie/torch/autograd/expert_mlp_wire.h"
#include "moxie/torch/exchange/legs.h"

namespace moxie::ops::mlp {

struct GroupPathArgs {
  Group group;
  Wire wire;
  Agreed agreed;
  TokenRows rows;  // from this rank's tokens to rows for the experts of all ranks
  at::ScalarType x_dtype;
  bool has_b2;
};
// The tokens as they travel, and what goes with them.
struct XForWire {
  Quantized tokens;
  Tensor pairs;
};
// Makes the path, and sends x.
std::unique_ptr<TokenPath> group_path(const GroupPathArgs& args, const XForWire& x);

}  // namespace moxie::ops::mlp
