#include "moxie/core/row_scale/row_scale.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/row_scale/backends.h"

namespace moxie {
namespace {

constexpr std::string_view kOp = "quantize_row_scale";

void check_form(const RowScaleOut& out, const Shape& x, const Panels& panels, Form form) {
  const auto expected = row_scale_shape<int64_t>(x, num_groups(panels), form);
  const bool rowwise = form == Form::kRowwise;
  check_shape(kOp, rowwise ? "qdata" : "qdata_t", out.qdata.shape, expected.qdata);
  check_shape(kOp, rowwise ? "scale" : "scale_t", out.scale.shape, expected.scale);
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Exec& exec) {
  MOXIE_CHECK(args.rowwise || args.colwise, kOp,
              ": at least one of the forms rowwise and colwise must be requested, got none");
  const Panels panels = make_panels(kOp, args.x.shape, args.offs, exec.backend);
  if (args.rowwise) check_form(*args.rowwise, args.x.shape, panels, Form::kRowwise);
  if (args.colwise) check_form(*args.colwise, args.x.shape, panels, Form::kColwise);
  dispatch(
      kOp, exec, [&] { ref::quantize_row_scale(args, panels); },
      [&] { cpu::quantize_row_scale(args, panels, exec); },
      [&](auto stream) { cuda::quantize_row_scale(args, panels, stream); });
}

}  // namespace moxie
