// The backends of this folder's ops; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/gemm/decode.h"
#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/grouped_wgrad.h"
#include "moxie/core/gemm/product.h"

namespace moxie {

namespace ref {
void grouped_mm(const GroupedMmArgs& args, const Panels& panels);
void grouped_wgrad(const GroupedWgradArgs& args, const Panels& panels);
void decode(const DecodeArgs& args);
void product(const ProductArgs& args, const Panels& panels);
void finish_rows(const FinishRowsArgs& args, const Panels& panels);
}  // namespace ref
namespace cpu {
void decode(const DecodeArgs& args, const Exec& exec);
}
namespace cuda {
void product(const ProductArgs& args, const Panels& panels, void* stream);
void finish_rows(const FinishRowsArgs& args, const Panels& panels, void* stream);
}  // namespace cuda
namespace sm90 {
void grouped_mm(const GroupedMmArgs& args, const Panels& panels, void* stream);
void grouped_wgrad(const GroupedWgradArgs& args, const Panels& panels, void* stream);
}  // namespace sm90

}  // namespace moxie
