#include "moxie/core/requantize/requantize.h"

#include <vector>

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/requantize/backends.h"

namespace moxie {

namespace {

void requantize_on_ref(const RequantizeArgs& args, const Panels& panels) {
  if (!args.apart) return ref::requantize(args, panels);
  const int64_t rows = args.qdata.dim(0), cols = args.qdata.dim(1);
  std::vector<std::byte> together(rows * cols);
  copy_rows({.rows = rows,
             .width = cols,
             .from = *args.apart,
             .to = {.buffer = {together.data(), {rows * cols}}, .stride = cols}},
            {.backend = Backend::kRef});
  RequantizeArgs dense = args;
  dense.qdata.data = reinterpret_cast<const e4m3*>(together.data());
  ref::requantize(dense, panels);
}

}  // namespace

bool can_gather(const RequantizeArgs& args, const Exec& exec) {
  if (!args.apart || args.qdata.shape.dims != 2) return false;
  if (exec.backend != Backend::kCuda) return exec.backend == Backend::kRef;
  if constexpr (kHasCuda) return cuda::can_gather(args);
  return false;
}

void requantize(const RequantizeArgs& args, const Exec& exec) {
  const Shape& x = args.qdata.shape;
  const Panels panels = make_panels("requantize", x, args.offs, exec.backend);
  check_operand_block("requantize", Form::kRowwise, args.block, panels);
  check_layout("requantize", Form::kRowwise, args.block, args.from_layout);
  const auto expected = operand_shape<int64_t>(x, num_groups(args.offs), Form::kRowwise, args.block,
                                               args.from_layout);
  check_shape("requantize", "scale", args.scale.shape, expected.scale);
  check_quantized_out("requantize", Form::kColwise, args.colwise, x, panels);
  if (args.apart)
    MOXIE_CHECK(can_gather(args, exec),
                "requantize: rows that lie apart must be put together for this backend or GPU");
  dispatch(
      "requantize", exec, [&] { requantize_on_ref(args, panels); },
      [&] { cpu::requantize(args, panels, exec); },
      [&](auto stream) { cuda::requantize(args, panels, stream); });
}

}  // namespace moxie
