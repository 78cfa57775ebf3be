// The shared memory as kernels see it, and the barrier of all ranks. Includes no CUDA headers, so
// that tests run ranks on a CPU (tests/support/cta_on_host.h).
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/exchange/shared_memory.h"

namespace moxie::cuda {

struct Peers {
  std::byte* base[kMaxRanks] = {};
  Regions at;
  Capacity capacity;
  Status* status;
  int64_t timeout_ns;
  int rank, ranks, local_experts;

  template <class T>
  __device__ T* region(int of_rank, int64_t offset) const {
    return reinterpret_cast<T*>(base[of_rank] + offset);
  }
  template <class T>
  __device__ T* own(int64_t offset) const {
    return region<T>(rank, offset);
  }
  __device__ Meeting& meeting(int of_rank) const { return *region<Meeting>(of_rank, 0); }
  __device__ bool has_failed() const { return meeting(rank).failure != 0; }
};

inline Peers peers_of(const SharedMemory& memory) {
  Peers peers{.at = regions_of(memory.capacity),
              .capacity = memory.capacity,
              .status = memory.status,
              .timeout_ns = memory.timeout_ns,
              .rank = static_cast<int>(memory.rank),
              .ranks = static_cast<int>(memory.capacity.ranks),
              .local_experts = static_cast<int>(memory.capacity.experts / memory.capacity.ranks)};
  for (int r = 0; r < peers.ranks; ++r) peers.base[r] = memory.base[static_cast<size_t>(r)];
  return peers;
}

// The first failure of this rank is the one that is kept.
__device__ inline void fail(const Peers& peers, Failure failure, const Status& status) {
  unsigned long long* const own =
      reinterpret_cast<unsigned long long*>(&peers.meeting(peers.rank).failure);
  if (atomicCAS(own, 0ULL, static_cast<unsigned long long>(failure)) != 0) return;
  volatile Status* const out = peers.status;
  out->step = status.step;
  out->rank = status.rank;
  out->value = status.value;
  out->limit = status.limit;
  __threadfence_system();
  out->failure = static_cast<int64_t>(failure);
  __threadfence_system();
}

static_assert(kMaxRanks <= kThreads, "in the barrier each rank has a thread");

// All threads of one CTA call it, and no other CTA. What earlier kernels of the stream and this CTA
// have written is visible to every rank behind it. A rank that has failed does not wait, and tells
// the others. Words stores and loads words that other GPUs see, and has a clock in nanoseconds.
template <class Words>
__device__ void meet_by(const Peers& peers, Step step) {
  Meeting& own = peers.meeting(peers.rank);
  const uint64_t reached = word_of(barrier_of(own.passed) + 1, step);
  const bool failed = own.failure != 0;
  const int r = static_cast<int>(threadIdx.x);
  __threadfence_system();
  __syncthreads();
  const auto tell = [&](uint64_t word) {
    Words::store_release(&peers.meeting(r).arrived[peers.rank], word);
  };
  if (r < peers.ranks) {
    tell(failed ? own.passed | kFailedBit : reached);
    const uint64_t start = Words::time();
    Status status{.step = static_cast<int64_t>(step), .rank = r};
    for (bool waits = !failed; waits;) {
      const uint64_t word = Words::load_acquire(&own.arrived[r]);
      const Word said = read_word(word, reached);
      status.value = static_cast<int64_t>(step_of(word));
      if (said == Word::kFailed) fail(peers, Failure::kPeer, status);
      if (said == Word::kElsewhere) fail(peers, Failure::kElsewhere, status);
      // Once this rank has failed it waits for no other.
      waits = said == Word::kEarlier && *const_cast<volatile uint64_t*>(&own.failure) == 0;
      // Signed: the clocks of two multiprocessors may differ, and a CTA may be moved.
      const auto waited = static_cast<int64_t>(Words::time() - start);
      if (waits && waited > peers.timeout_ns) {
        fail(peers, Failure::kStalled, status);
        waits = false;
      }
    }
  }
  __syncthreads();
  if (failed) return;
  if (r < peers.ranks && *const_cast<volatile uint64_t*>(&own.failure) != 0)
    tell(reached | kFailedBit);
  if (threadIdx.x == 0) own.passed = reached;
}

}  // namespace moxie::cuda
