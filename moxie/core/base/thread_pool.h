// A fixed set of threads for programs that use moxie/core without torch.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "moxie/core/base/exec.h"

namespace moxie {

class ThreadPool final : public Parallel {
 public:
  explicit ThreadPool(int num_threads);  // the calling thread counts as one of them
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // One run at a time; body must not call run on the same pool. An exception that a range throws
  // reaches the caller after the other ranges have ended.
  void run(int64_t count, int64_t grain, const Body& body) override;

 private:
  struct Job;
  void worker();
  static void work_on(Job& job);

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace moxie
