#include "moxie/core/quantize/quantize.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/quantize/backends.h"

namespace moxie {

Panels check_forms(std::string_view op, const Shape& x, const QuantizeForms& forms,
                   Backend backend) {
  MOXIE_CHECK(forms.rowwise || forms.colwise, op,
              ": at least one of the forms rowwise and colwise must be requested, got none");
  const Panels panels = make_panels(op, x, forms.offs, backend);
  if (forms.rowwise) check_quantized_out(op, Form::kRowwise, *forms.rowwise, x, panels);
  if (forms.colwise) check_quantized_out(op, Form::kColwise, *forms.colwise, x, panels);
  return panels;
}

void quantize(const QuantizeArgs& args, const Exec& exec) {
  const Panels panels = check_forms("quantize", args.x.shape, forms_of(args), exec.backend);
  dispatch(
      "quantize", exec, [&] { ref::quantize(args, panels); },
      [&] { cpu::quantize(args, panels, exec); },
      [&](auto stream) { cuda::quantize(args, panels, stream); });
}

}  // namespace moxie
