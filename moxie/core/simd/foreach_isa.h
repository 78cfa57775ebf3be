// Compiles a file once per instruction set:
//
//   #define MOXIE_ISA_BODY "moxie/core/swiglu/swiglu_cpu.inc"
//   #include "moxie/core/simd/foreach_isa.h"                      // after every other header
//   ... pick_isa(op, exec, MOXIE_EACH_ISA(swiglu_rows<bf16>))     // simd/pick_isa.h
//
// The body is compiled into moxie::cpu::baseline, ::avx2 and ::avx512, after the shared kernels of
// this folder; MOXIE_ISA_BODY is optional. An .inc file must not include anything: an inline
// function of a header would be compiled for AVX-512, and the linker could choose that copy for a
// machine without it. All functions of an .inc file are static.
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "moxie/core/base/math.h"
#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/simd/tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOXIE_ISA baseline
#define MOXIE_ISA_LEVEL 0
#include "moxie/core/simd/one_isa.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define MOXIE_ISA avx2
#define MOXIE_ISA_LEVEL 1
#include "moxie/core/simd/one_isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// base/isa.cc checks that the machine has all of these sets. prefer-vector-width: by default
// compilers use only half of a 512-bit register.
#if defined(__clang__)
#pragma clang attribute push(                                                              \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define MOXIE_ISA avx512
#define MOXIE_ISA_LEVEL 2
#include "moxie/core/simd/one_isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define MOXIE_EACH_ISA(...) baseline::__VA_ARGS__, avx2::__VA_ARGS__, avx512::__VA_ARGS__

#else
#define MOXIE_EACH_ISA(...) baseline::__VA_ARGS__
#endif

#undef MOXIE_ISA_BODY
