#include "moxie/cli/info/gpus.h"

#include <dlfcn.h>

#include <array>
#include <charconv>
#include <sstream>

namespace moxie::cli {
namespace {

// Values of constants in cuda.h, which is not included.
constexpr int kSuccess = 0, kCapabilityMajor = 75, kCapabilityMinor = 76;

// NVIDIA's driver library, loaded at run time. It is never unloaded, because that is not safe after
// cuInit.
class Driver {
 public:
  Driver() : handle_(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}

  // Calls a function of the driver. Returns false if the function does not exist or fails.
  template <class... Args>
  bool call(const char* function, Args... args) const {
    if (handle_ == nullptr) return false;
    auto* found = reinterpret_cast<int (*)(Args...)>(::dlsym(handle_, function));
    return found != nullptr && found(args...) == kSuccess;
  }

 private:
  void* handle_;
};

}  // namespace

std::vector<Gpu> find_gpus() {
  const Driver driver;
  int count = 0;
  if (!driver.call("cuInit", 0u) || !driver.call("cuDeviceGetCount", &count)) return {};
  std::vector<Gpu> gpus;
  for (int i = 0; i < count; ++i) {
    int device = 0, major = 0, minor = 0;
    size_t bytes = 0;
    std::array<char, 256> name = {};
    if (!driver.call("cuDeviceGet", &device, i)) continue;
    driver.call("cuDeviceGetName", name.data(), static_cast<int>(name.size() - 1), device);
    driver.call("cuDeviceTotalMem_v2", &bytes, device);
    driver.call("cuDeviceGetAttribute", &major, kCapabilityMajor, device);
    driver.call("cuDeviceGetAttribute", &minor, kCapabilityMinor, device);
    gpus.push_back({name.data(), major * 10 + minor, static_cast<int64_t>(bytes)});
  }
  return gpus;
}

bool runs_on(std::string_view archs, int capability) {
  std::istringstream words{std::string(archs)};
  for (std::string arch; words >> arch;) {
    int number = 0;
    const auto parsed = std::from_chars(arch.data(), arch.data() + arch.size(), number);
    const std::string_view rest(parsed.ptr, arch.data() + arch.size() - parsed.ptr);
    if (number == capability) return true;
    // Kernels for 90a run on 9.0 only. Others also run on later GPUs of the same generation. Unless
    // the name ends with "-real" there is PTX too, which the driver compiles for any later GPU.
    const bool is_later = number <= capability && !rest.starts_with('a') && !rest.starts_with('f');
    if (is_later && (number / 10 == capability / 10 || !rest.ends_with("-real"))) return true;
  }
  return false;
}

}  // namespace moxie::cli
