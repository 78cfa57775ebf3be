// Arena: memory for one run of an op on one backend. It copies inputs in and results out, fills
// outputs with poison and surrounds them with fences, so the same test code serves every backend.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"
#include "tests/support/device_memory.h"

namespace moxie::testing {

class Arena {
 public:
  // misalign: how many elements every buffer is shifted by, like the data of a torch view.
  explicit Arena(Backend backend, int misalign = 0) : backend_(backend), misalign_(misalign) {}

  template <class T>
  View<const T> input(const std::vector<T>& values, Shape shape) {
    EXPECT_EQ(static_cast<int64_t>(values.size()), numel(shape));
    Buffer& buffer = add(values.size() * sizeof(T), sizeof(T));
    if (!values.empty()) std::memcpy(buffer.host(), values.data(), values.size() * sizeof(T));
    upload(buffer);
    return {static_cast<const T*>(buffer.pointer), shape};
  }

  // Poisoned, so that a byte that was not written shows up as a difference.
  template <class T>
  View<T> output(Shape shape) {
    Buffer& buffer = add(numel(shape) * sizeof(T), sizeof(T));
    std::memset(buffer.memory.data(), kPoison, buffer.memory.size());
    upload(buffer);
    outputs_.push_back(buffers_.size() - 1);
    return {static_cast<T*>(buffer.pointer), shape};
  }

  FloatView float_output(Format format, Shape shape) {
    void* const data = format == Format::kF32 ? static_cast<void*>(output<float>(shape).data)
                                              : output<bf16>(shape).data;
    return {data, format, shape};
  }

  // The bytes of all outputs, in the order in which output() made them. Fails the test if an op
  // wrote to the fences around them.
  std::vector<std::vector<uint8_t>> results() {
    std::vector<std::vector<uint8_t>> all;
    for (const size_t i : outputs_) {
      Buffer& buffer = *buffers_[i];
      download(buffer);
      for (size_t at = 0; at < buffer.memory.size(); ++at) {
        const bool inside = at >= buffer.begin && at < buffer.begin + buffer.bytes;
        if (!inside && buffer.memory[at] != kPoison) {
          ADD_FAILURE() << "output " << all.size() << " was written out of bounds, "
                        << (at < buffer.begin ? "before" : "after") << " its " << buffer.bytes
                        << " bytes";
          break;
        }
      }
      all.emplace_back(buffer.host(), buffer.host() + buffer.bytes);
    }
    return all;
  }

 private:
  static constexpr uint8_t kPoison = 0xa5;
  static constexpr size_t kFence = 256;

  struct Buffer {
    std::vector<uint8_t> memory;  // fence, shift, contents, fence
    size_t begin = 0, bytes = 0;
    void* pointer = nullptr;
    DeviceBuffer device;
    uint8_t* host() { return memory.data() + begin; }
  };

  Buffer& add(size_t bytes, size_t element) {
    auto& buffer = *buffers_.emplace_back(std::make_unique<Buffer>());
    buffer.begin = kFence + element * misalign_;
    buffer.bytes = bytes;
    buffer.memory.assign(buffer.begin + bytes + kFence, kPoison);
    if (backend_ == Backend::kCuda) {
      buffer.device = DeviceBuffer(buffer.memory.size());
      buffer.pointer = static_cast<uint8_t*>(buffer.device.data()) + buffer.begin;
    } else {
      buffer.pointer = buffer.host();
    }
    return buffer;
  }

  void upload(Buffer& buffer) {
    if (backend_ == Backend::kCuda)
      copy_to_device(buffer.device.data(), buffer.memory.data(), buffer.memory.size());
  }
  void download(Buffer& buffer) {
    if (backend_ == Backend::kCuda)
      copy_to_host(buffer.memory.data(), buffer.device.data(), buffer.memory.size());
  }

  Backend backend_;
  int misalign_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<size_t> outputs_;
};

}  // namespace moxie::testing
