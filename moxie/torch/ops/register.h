// One function per family registers its ops, under the names of schema.cc, for every device. An op
// looks at the device of its arguments; on Meta it returns after checking and allocating.
#pragma once

#include <torch/library.h>

#define MOXIE_REGISTER_OPS(function)                  \
  TORCH_LIBRARY_IMPL(moxie, CPU, m) { function(m); }  \
  TORCH_LIBRARY_IMPL(moxie, CUDA, m) { function(m); } \
  TORCH_LIBRARY_IMPL(moxie, Meta, m) { function(m); }
