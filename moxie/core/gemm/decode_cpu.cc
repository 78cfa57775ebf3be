#include <memory>

#include "moxie/core/base/parallel.h"
#include "moxie/core/gemm/backends.h"
#include "moxie/core/simd/pick_isa.h"
#include "moxie/core/simd/tile.h"

namespace moxie::cpu {
namespace {

struct DecodeScratch {
  Scratch tile;
  alignas(64) uint8_t row[(kTileCols + 64) * sizeof(float)];
};

}  // namespace
}  // namespace moxie::cpu

#define MOXIE_ISA_BODY "moxie/core/gemm/decode_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

template <class T>
void decode_as(const DecodeArgs& args, const Exec& exec) {
  const auto kernel = pick_isa("decode", exec, MOXIE_EACH_ISA(decode_rows<T>));
  const GemmOperand& from = args.operand;
  const int64_t outer = from.qdata.dim(-2), k = from.qdata.dim(-1);
  const int64_t scale_rows = ceil_div<int64_t>(outer, from.outer_block);
  const int64_t scale_cols = ceil_div<int64_t>(k, from.k_block);
  const Source source{Form::kRowwise,
                      {from.outer_block, from.k_block},
                      reinterpret_cast<const uint8_t*>(from.qdata.data) + args.matrix * outer * k,
                      from.scale.data + args.matrix * scale_rows * scale_cols,
                      {.qdata_stride = k, .scale_stride = scale_cols, .outer = outer, .k = k}};
  const int64_t rows = args.out.dim(0), cols = args.out.dim(1);
  // 16k elements: below that, waking a thread costs more than it saves.
  const int64_t grain = max<int64_t>(1, (16 << 10) / max<int64_t>(cols, 1));
  parallel_for(exec, rows, grain, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<DecodeScratch>();
    kernel(source, args.first_outer + begin, end - begin, args.first_k, cols,
           static_cast<T*>(args.out.data) + begin * cols, *scratch);
  });
}

}  // namespace

void decode(const DecodeArgs& args, const Exec& exec) {
  if (args.out.format == Format::kBf16)
    decode_as<bf16>(args, exec);
  else
    decode_as<float>(args, exec);
}

}  // namespace moxie::cpu
