// Registers the ops of one file for every device: `function` calls m.impl() for each, under its
// name in schema.cc. An op asks its arguments for their device; on Meta it returns after checking
// and allocating.
#pragma once

#include <torch/library.h>

#define MOXIE_REGISTER_OPS(function)                  \
  TORCH_LIBRARY_IMPL(moxie, CPU, m) { function(m); }  \
  TORCH_LIBRARY_IMPL(moxie, CUDA, m) { function(m); } \
  TORCH_LIBRARY_IMPL(moxie, Meta, m) { function(m); }
