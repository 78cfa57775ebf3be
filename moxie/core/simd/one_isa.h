// One round of foreach_isa.h: the shared kernels, then the body, for the instruction set MOXIE_ISA.
// No include guard: it is read once per set.
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
