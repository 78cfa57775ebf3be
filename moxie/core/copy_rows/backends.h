// The backends of copy_rows; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/copy_rows/copy_rows.h"

namespace moxie {

namespace ref {
void copy_rows(const CopyRowsArgs& args);
}  // namespace ref
namespace cpu {
void copy_rows(const CopyRowsArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void copy_rows(const std::vector<CopyRowsArgs>& copies, void* stream);
}  // namespace cuda

}  // namespace moxie
