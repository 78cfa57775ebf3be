// Compiles the shared kernels and then the body for one instruction set, MOXIE_ISA. foreach_isa.h
// includes it once per set, so it has no include guard.
#include "moxie/core/simd/vec.inc"
//
#include "moxie/core/simd/stream.inc"
//
#include "moxie/core/simd/encode.inc"
//
#include "moxie/core/simd/decode.inc"
//
#include "moxie/core/simd/scale.inc"
//
#include "moxie/core/simd/transpose.inc"
//
#include "moxie/core/simd/quantize.inc"
//
#ifdef MOXIE_ISA_BODY
#include MOXIE_ISA_BODY
#endif

#undef MOXIE_ISA
#undef MOXIE_ISA_LEVEL
