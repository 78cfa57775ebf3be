#include "moxie/core/dequantize/dequantize.h"

#include "moxie/core/base/dispatch.h"
#include "moxie/core/dequantize/backends.h"

namespace moxie {

void dequantize(const DequantizeArgs& args, const Exec& exec) {
  const Panels panels = make_panels("dequantize", args.x.shape, args.offs, exec.backend);
  check_operand_block("dequantize", args.form, args.block, panels);
  check_layout("dequantize", args.form, args.block, args.layout);
  const auto expected = operand_shape<int64_t>(args.x.shape, num_groups(args.offs), args.form,
                                               args.block, args.layout);
  const bool rowwise = args.form == Form::kRowwise;
  check_shape("dequantize", rowwise ? "qdata" : "qdata_t", args.qdata.shape, expected.qdata);
  check_shape("dequantize", rowwise ? "scale" : "scale_t", args.scale.shape, expected.scale);
  dispatch(
      "dequantize", exec, [&] { ref::dequantize(args, panels); },
      [&] { cpu::dequantize(args, panels, exec); },
      [&](auto stream) { cuda::dequantize(args, panels, stream); });
}

}  // namespace moxie
