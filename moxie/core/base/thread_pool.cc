#include "moxie/core/base/thread_pool.h"

#include <atomic>
#include <exception>

#include "moxie/core/base/check.h"
#include "moxie/core/base/math.h"

namespace moxie {

struct ThreadPool::Job {
  const Body* body;
  int64_t count, chunk;
  std::atomic<int64_t> next{0};
  std::mutex error_mutex{};
  std::exception_ptr error{};
};

ThreadPool::ThreadPool(int num_threads) {
  MOXIE_CHECK(num_threads >= 1, "ThreadPool: num_threads must be at least 1, got ", num_threads);
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { worker(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::work_on(Job& job) {
  for (;;) {
    const int64_t begin = job.next.fetch_add(job.chunk);
    if (begin >= job.count) return;
    try {
      (*job.body)(begin, min(begin + job.chunk, job.count));
    } catch (...) {
      std::lock_guard lock(job.error_mutex);
      if (!job.error) job.error = std::current_exception();
    }
  }
}

void ThreadPool::worker() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || (job_ && generation_ != seen); });
    if (stop_) return;
    seen = generation_;
    Job* job = job_;
    ++busy_;
    lock.unlock();
    work_on(*job);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void ThreadPool::run(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  // Four chunks a thread even out ranges of unequal cost.
  const auto workers = static_cast<int64_t>(threads_.size()) + 1;
  Job job{.body = &body, .count = count, .chunk = max(grain, ceil_div(count, 4 * workers))};
  if (threads_.empty() || job.chunk >= count) {
    body(0, count);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
    ++generation_;
  }
  wake_.notify_all();
  work_on(job);
  std::unique_lock lock(mutex_);
  job_ = nullptr;  // a thread that wakes only now must not start on it
  done_.wait(lock, [&] { return busy_ == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace moxie
