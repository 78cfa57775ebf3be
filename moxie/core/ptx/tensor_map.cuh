// TMA on the host: tensor maps, made once per launch, that describe a tensor of bytes.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "moxie/core/base/check.h"

namespace moxie::ptx {

template <int kDims>
struct TensorMapArgs {
  const void* data;                        // 16-byte aligned
  std::array<uint64_t, kDims> size;        // innermost first; the innermost is contiguous
  std::array<uint64_t, kDims - 1> stride;  // bytes, of every dimension but the innermost
  std::array<uint32_t, kDims> box;         // the box of one copy; box[0] is 128
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;  // as wgmma reads rows of 128 bytes
};

// Looks up the driver's function at run time, so that the library links without libcuda.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  MOXIE_CHECK(status == cudaSuccess && found == cudaDriverEntryPointSuccess,
              "tensor map: the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

// Boxes have rows of 128 bytes. Elements outside the tensor are read as zeros.
template <int kDims>
CUtensorMap make_tensor_map(const TensorMapArgs<kDims>& args) {
  static const auto encode = tensor_map_encoder();
  std::array<uint32_t, kDims> every;
  every.fill(1);
  CUtensorMap map{};
  const CUresult status = encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kDims, const_cast<void*>(args.data), args.size.data(),
      args.stride.data(), args.box.data(), every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      args.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MOXIE_CHECK(status == CUDA_SUCCESS, "tensor map: cuTensorMapEncodeTiled failed with ",
              static_cast<int>(status));
  return map;
}

}  // namespace moxie::ptx
