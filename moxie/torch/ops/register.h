// One function per family of ops registers it, under the names of schema.cc, for every device: it
// looks at the device of its arguments, and on Meta returns before there is anything to compute.
#pragma once

#include <torch/library.h>

#define MOXIE_REGISTER_OPS(function)                  \
  TORCH_LIBRARY_IMPL(moxie, CPU, m) { function(m); }  \
  TORCH_LIBRARY_IMPL(moxie, CUDA, m) { function(m); } \
  TORCH_LIBRARY_IMPL(moxie, Meta, m) { function(m); }
