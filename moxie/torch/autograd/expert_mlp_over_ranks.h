// What calls over ranks have in common, whatever carries their tokens: arguments, their checks, and
// a number by which ranks see that their calls fit together.
#pragma once

#include <string>

#include "moxie/torch/autograd/expert_mlp_wire.h"

namespace moxie::ops::mlp {

struct ParallelArgs {
  const Tensor &x, &w13, &w2;
  const Tensor &weights, &offs, &slot_of, &row_of;  // of this rank's tokens, to all experts
  std::string group;
  std::string_view wire;
  const ExpertMlpOptions& options;  // without the route

  at::ScalarType rows_dtype() const { return options.x_dtype.value_or(x.scalar_type()); }
};

// Refuses calls that are traced, and a route or rows that do not fit `world` ranks. Call it before
// anything is sent: an error must not leave other ranks waiting.
void check_parallel(const ParallelArgs& args, int64_t world);

// Ends that do not decrease, stay within the rows and end with them: on a GPU they are put in
// order, because to look at them would be a wait.
Tensor ends_in_order(const ParallelArgs& args);

// A number that is equal on all ranks where their calls fit together.
int32_t signature_of(const ParallelArgs& args, const Recipe& recipe, Wire wire);

// expert_mlp's checks and plan, for so many rows of this rank's experts. `options` has their offs.
Call checked_call(const ParallelArgs& args, const ExpertMlpOptions& options, int64_t rows,
                  const Needs& needs);
// The same for rows that came over `wire`.
Call call_of_received(const ParallelArgs& args, const ExpertMlpOptions& options, int64_t rows,
                      const Needs& needs, Wire wire);

}  // namespace moxie::ops::mlp
