#include "moxie/core/requantize/requantize.h"

#include "moxie/core/base/dispatch.h"
#include "moxie/core/requantize/backends.h"

namespace moxie {

void requantize(const RequantizeArgs& args, const Exec& exec) {
  const Shape& x = args.qdata.shape;
  const Panels panels = make_panels("requantize", x, args.offs, exec.backend);
  check_operand_block("requantize", Form::kRowwise, args.block, panels);
  check_layout("requantize", Form::kRowwise, args.block, args.from_layout);
  const auto expected = operand_shape<int64_t>(x, num_groups(args.offs), Form::kRowwise, args.block,
                                               args.from_layout);
  check_shape("requantize", "scale", args.scale.shape, expected.scale);
  check_quantized_out("requantize", Form::kColwise, args.colwise, x, panels);
  dispatch(
      "requantize", exec, [&] { ref::requantize(args, panels); },
      [&] { cpu::requantize(args, panels, exec); },
      [&](auto stream) { cuda::requantize(args, panels, stream); });
}

}  // namespace moxie
