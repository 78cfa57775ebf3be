#include "moxie/core/quantize/quantize.h"

#include "moxie/core/base/check.h"
#include "moxie/core/quantize/backends.h"

namespace moxie {

void quantize(const QuantizeArgs& args, const Exec& exec) {
  MOXIE_CHECK(args.rowwise || args.colwise,
              "quantize: at least one of the forms rowwise and colwise must be asked for");
  const Panels panels = make_panels("quantize", args.x.shape, args.offs, exec.backend);
  if (args.rowwise) check_operand("quantize", Form::kRowwise, *args.rowwise, args.x.shape, panels);
  if (args.colwise) check_operand("quantize", Form::kColwise, *args.colwise, args.x.shape, panels);
  switch (exec.backend) {
    case Backend::kRef: return ref::quantize(args, panels);
    case Backend::kCpu: return cpu::quantize(args, panels, exec);
    case Backend::kCuda:
      if constexpr (kHasCuda) return cuda::quantize(args, panels, exec.stream);
  }
  fail_without_cuda("quantize");
}

}  // namespace moxie
