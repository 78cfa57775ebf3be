#include "moxie/core/quantize/backends.h"
#include "moxie/core/quantize/quantize_kernel.cuh"

namespace moxie::cuda {

void quantize(const QuantizeArgs& args, const Panels& panels, void* stream) {
  const QuantizeForms forms = forms_of(args);
  with_format(args.x.format, [&]<class T>() {
    const auto* x = static_cast<const T*>(args.x.data);
    with_alignment(are_rows_aligned(x, panels.cols, kFragment) && are_forms_aligned(forms),
                   [&]<bool kAligned>() {
                     launch_quantize("quantize", forms, panels,
                                     FloatSource<T, kAligned>{{}, x, panels.cols}, stream);
                   });
  });
}

}  // namespace moxie::cuda
