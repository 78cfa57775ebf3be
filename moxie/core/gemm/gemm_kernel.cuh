// The GEMM kernel of all three passes, and its launch.
#pragma once

#include <type_traits>

#include "moxie/core/base/device.h"
#include "moxie/core/gemm/choose_tile.h"
#include "moxie/core/gemm/consumer.cuh"
#include "moxie/core/gemm/epilogue.cuh"
#include "moxie/core/gemm/producer.cuh"
#include "moxie/core/gemm/schedule_rows.cuh"
#include "moxie/core/gemm/schedule_wgrad.cuh"
#include "moxie/core/ptx/cluster.cuh"
#include "moxie/core/ptx/tensor_map.cuh"

namespace moxie::sm90 {

// Runs in the scheduler warp, which writes the ring of tiles.
template <class Tile>
__device__ void schedule(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair) {
  std::conditional_t<Tile::kRagged == Ragged::kRows, RowsSchedule<Tile>, WgradSchedule<Tile>>
      schedule(p, shared.schedule, cta_in_pair);
  RingPlace<GemmShared<Tile>::kWorks> at;
  for (bool more = true; more; at.advance()) {
    const Work work = schedule.next();
    more = work.valid;
    ptx::mbarrier_sleep(&shared.work_empty[at.slot], at.phase ^ 1);
    if (cuda::lane_index() == 0) {
      shared.work[at.slot] = work;
      ptx::mbarrier_arrive(&shared.work_full[at.slot]);
    }
    __syncwarp();
  }
}

template <class Tile, class Out>
__global__ __launch_bounds__(Tile::kThreads,
                             1) void gemm_kernel(const __grid_constant__ GemmParams p) {
  using Shared = GemmShared<Tile>;
  using MyEpilogue = Epilogue<Tile, Out>;
  constexpr int kConsumerWarps = Tile::kConsumerWarps;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int warp = uniform(cuda::warp_index());
  const int cta_in_pair = static_cast<int>(ptx::cluster_cta_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1 + Tile::kScaleWarps);
      ptx::mbarrier_init(&shared.empty[i], kConsumerWarps * kCluster);
    }
    for (int i = 0; i < Shared::kWorks; ++i) {
      ptx::mbarrier_init(&shared.work_full[i], 1);
      ptx::mbarrier_init(&shared.work_empty[i], kConsumerWarps + 1 + Tile::kScaleWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.a);
    ptx::prefetch_tensormap(&p.b);
    if (sizeof(Out) == 2) ptx::prefetch_tensormap(&p.out_map);
  }
  __syncthreads();
  ptx::cluster_sync();

  if (warp >= kConsumerWarps) {
    ptx::setmaxnreg_dec<Tile::kOtherRegisters>();
    if (warp == kConsumerWarps) {
      if (ptx::elect_one()) produce<MyEpilogue::kFold>(p, shared, cta_in_pair);
    } else if (warp == kConsumerWarps + 1) {
      schedule<Tile>(p, shared, cta_in_pair);
    } else {
      ScaleWarp<Tile>(p, shared, warp - kConsumerWarps - 2).run();
    }
  } else {
    ptx::setmaxnreg_inc<Tile::kRegisters>();
    const MyEpilogue epilogue(p, shared);
    Consumer<Tile> consumer(p, shared);
    consumer.run([&](const Work& work, Product& sums) { epilogue.store(work, sums); });
    epilogue.finish();
  }
  ptx::cluster_sync();  // the other CTA may still arrive at barriers in this one's shared memory
}

// The elements of an operand.
struct OperandData {
  const void* data;
  int64_t outer, k;  // [outer, k]; TMA reads zeros past k
  int64_t stride;    // from one row to the next
};

// The tensor map of a: a box is 128 along k and the rows that one CTA of the pair loads.
inline CUtensorMap a_map(const OperandData& a, int rows) {
  return ptx::make_tensor_map<2>({.data = a.data,
                                  .size = {uint64_t(a.k), uint64_t(a.outer)},
                                  .stride = {uint64_t(a.stride)},
                                  .box = {kTileK, uint32_t(rows)}});
}

// The tensor map of b, which reorders b's rows on load so that each thread's results are runs of
// `run` neighbouring columns. Of each fold = 4 * run columns wgmma gives lane q of four the columns
// 8j + 2q + e (e = 0, 1); the map puts row run * q + 2j + e there. run = 2 is the natural order.
inline CUtensorMap b_map(const OperandData& b, Format out) {
  const auto row = static_cast<uint64_t>(b.stride);
  const uint32_t run = out == Format::kBf16 ? 2 : 4, fold = 4 * run;
  return ptx::make_tensor_map<5>({.data = b.data,
                                  .size = {uint64_t(b.k), 2, 4, fold / 8, uint64_t(b.outer) / fold},
                                  .stride = {row, row * run, row * 2, row * fold},
                                  .box = {kTileK, 2, 4, fold / 8, kTileN / fold}});
}

// The tensor map of out [rows, n] in bf16, described in bytes; a box is a StoreBox.
inline CUtensorMap out_map(const FloatView& out, int64_t rows, int64_t n) {
  if (out.format != Format::kBf16) return {};
  const auto row = static_cast<uint64_t>(2 * n);
  return ptx::make_tensor_map<2>({.data = out.data,
                                  .size = {row, uint64_t(rows)},
                                  .stride = {row},
                                  .box = {StoreBox::kBytes, StoreBox::kRows}});
}

// Pairs of CTAs that the current device runs at once (one CTA per SM).
inline int pairs_at_once() { return min(num_multiprocessors(-1) / kCluster, kMaxPairs); }

// When the kernel may begin.
enum class Start {
  kAfterPrevious,
  // While the kernel before it in the stream runs, which must have called ptx::launch_dependents().
  // What that kernel writes may be read after ptx::wait_for_previous_kernel() only.
  kBesidePrevious,
};

struct GemmLaunch {
  std::string_view op;
  void* stream;
  int64_t pairs;  // upper bound of the pairs of CTAs that have work
  Start start = Start::kAfterPrevious;
};

template <class Tile, class Out>
void launch_kernel(const GemmLaunch& how, const GemmParams& params) {
  const auto kernel = gemm_kernel<Tile, Out>;
  constexpr int kShared = sizeof(GemmShared<Tile>);
  int device = 0;
  MOXIE_CUDA_CHECK(how.op, cudaGetDevice(&device));
  const int capability = compute_capability(device);
  MOXIE_CHECK(capability == 90, how.op, ": the Hopper kernel needs compute capability 9.0, got ",
              capability / 10, ".", capability % 10);
  cuda::allow_shared(how.op, reinterpret_cast<const void*>(kernel), kShared);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int64_t pairs = min<int64_t>(pairs_at_once(), how.pairs);
  config.gridDim.x = static_cast<unsigned>(pairs * kCluster);
  config.blockDim.x = Tile::kThreads;
  config.dynamicSmemBytes = kShared;
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = attributes;
  config.numAttrs = how.start == Start::kBesidePrevious ? 2 : 1;
  GemmParams with_counter = params;
  if (Tile::kRagged == Ragged::kDepth)
    with_counter.throttle = next_throttle_counter(static_cast<int>(pairs));
  MOXIE_CUDA_CHECK(how.op, cudaLaunchKernelEx(&config, kernel, with_counter));
}

template <Ragged kRagged>
void launch_gemm(const GemmLaunch& how, const GemmParams& params, const TileChoice& tile,
                 Format out) {
  const auto with_tile = [&]<class Tile>() {
    if (out == Format::kF32) return launch_kernel<Tile, float>(how, params);
    return launch_kernel<Tile, __nv_bfloat16>(how, params);
  };
  if (tile.rows == TallTile<kRagged>::kM) return with_tile.template operator()<TallTile<kRagged>>();
  return with_tile.template operator()<FlatTile<kRagged>>();
}

}  // namespace moxie::sm90
