// A vector whose values a backend reads and writes: in the memory of a GPU for cuda.
#pragma once

#include <utility>
#include <vector>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "tests/support/device_memory.h"

namespace moxie::testing {

template <class T>
class Values {
 public:
  Values(Backend backend, std::vector<T> values)
      : values_(std::move(values)), is_on_device_(backend == Backend::kCuda) {
    if (!is_on_device_) return;
    memory_ = DeviceBuffer(bytes());
    copy_to_device(memory_.data(), values_.data(), bytes());
  }
  View<T> view() {
    T* const data = is_on_device_ ? static_cast<T*>(memory_.data()) : values_.data();
    return {data, {static_cast<int64_t>(values_.size())}};
  }
  View<const T> const_view() { return {view().data, view().shape}; }
  const std::vector<T>& read() {
    if (is_on_device_) copy_to_host(values_.data(), memory_.data(), bytes());
    return values_;
  }

 private:
  size_t bytes() const { return values_.size() * sizeof(T); }

  std::vector<T> values_;
  bool is_on_device_;
  DeviceBuffer memory_;
};

}  // namespace moxie::testing
