#include "moxie/core/gemm/decode.h"

#include "moxie/core/base/check.h"
#include "moxie/core/gemm/backends.h"

namespace moxie {

void decode(const DecodeArgs& args, const Exec& exec) {
  const Shape& q = args.operand.qdata.shape;
  check_gemm_operand("decode", "operand", args.operand);
  MOXIE_CHECK(args.operand.layout == ScaleLayout::kPlain, "decode: scales must be plain, got ",
              name(args.operand.layout));
  MOXIE_CHECK(args.out.shape.dims == 2, "decode: out must be [outers, ks], got ", args.out.shape);
  MOXIE_CHECK(args.matrix >= 0 && args.matrix < (q.dims == 3 ? q[0] : 1),
              "decode: matrix must be in [0, ", q.dims == 3 ? q[0] : 1, "), got ", args.matrix);
  MOXIE_CHECK(args.first_outer >= 0 && args.first_outer + args.out.dim(0) <= q.dim(-2),
              "decode: outer range must be in [0, ", q.dim(-2), "], got [", args.first_outer, ", ",
              args.first_outer + args.out.dim(0), ")");
  MOXIE_CHECK(args.first_k >= 0 && args.first_k + args.out.dim(1) <= q.dim(-1),
              "decode: k range must be in [0, ", q.dim(-1), "], got [", args.first_k, ", ",
              args.first_k + args.out.dim(1), ")");
  MOXIE_CHECK(args.first_k % args.operand.k_block == 0, "decode: first_k must be a multiple of ",
              args.operand.k_block, ", got ", args.first_k);
  switch (exec.backend) {
    case Backend::kRef: return ref::decode(args);
    case Backend::kCpu: return cpu::decode(args, exec);
    case Backend::kCuda: fail("decode: runs on a CPU only, got cuda; use dequantize");
  }
}

}  // namespace moxie
