#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "moxie/cli/command.h"
#include "moxie/cli/info/cpu.h"
#include "moxie/cli/info/ep_cost.h"
#include "moxie/cli/info/ep_flags.h"
#include "moxie/cli/info/ep_published.h"
#include "moxie/cli/info/gpus.h"
#include "moxie/cli/text.h"
#include "moxie/core/base/exec.h"
#include "moxie/torch/plan/explain.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kWhat =
    "Say what this build and machine can do, and which kernels recipes take";
constexpr const char* kMore =
    "Examples:\n"
    "  moxie info                      versions, CPU, GPUs, and the kernels of every recipe\n"
    "  moxie info --n 2048 --k 7168    for expert weights of these sizes\n"
    "  moxie info --ep                 bytes and times of expert parallelism, EP 8 to 2048\n"
    "  moxie info --ep --nic 100       with faster NICs\n"
    "  moxie info --json | jq .gpus    the same for a script\n"
    "\n"
    "docs/INFO.md says more.";

constexpr const char* kKernels =
    "decode: operands are quantized, decoded and multiplied by the device's own product: the\n"
    "numerics of the recipe, the time of bf16 and the quantizers. sm90, sm90_rows, sm100: FP8\n"
    "tensor cores; of sm90_rows, only the passes with bf16 results.";

struct Flags {
  int64_t n = 2048, k = 7168;
  bool json = false;
};

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// Why Moxie does not use a GPU of this capability; empty if it does.
std::string why_not_used(int capability) {
  if (!at::globalContext().hasCUDART()) return "this torch has no CUDA";
  if (!at::globalContext().hasCUDA()) return "torch finds no GPU that it can use";
  if (!kHasCuda) return "this build of Moxie has no CUDA kernels (PRESET=cuda builds them)";
  if (runs_on(MOXIE_ARCHS, capability)) return "";
  return "this build has no kernels for " + capability_text(capability) +
         " (-DMOXIE_CUDA_ARCHS builds them)";
}

// The CPU, and the GPUs that Moxie uses.
std::vector<c10::Device> devices() {
  std::vector<c10::Device> all = {c10::Device(c10::kCPU)};
  const std::vector<Gpu> gpus = find_gpus();
  for (size_t i = 0; i < gpus.size(); ++i)
    if (why_not_used(gpus[i].capability).empty())
      all.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(i));
  return all;
}

// Explains forward and backward of bf16 tensors with weights [groups, n, k].
ops::Explanation explain(const std::string& recipe, c10::Device device, const Flags& flags) {
  constexpr int64_t kExperts = 8;  // any number up to 1023 gives the same kernels
  return ops::explain(
      {.recipe = recipe, .n = flags.n, .k = flags.k, .device = device, .groups = kExperts});
}

Json to_json(const Flags& flags) {
  const Cpu cpu = find_cpu();
  Json gpus = Json::array(), recipes = Json::array();
  for (const Gpu& gpu : find_gpus())
    gpus.push_back({{"name", gpu.name},
                    {"capability", capability_text(gpu.capability)},
                    {"memory_bytes", gpu.memory_bytes},
                    {"why_not_used", why_not_used(gpu.capability)}});
  for (const c10::Device device : devices())
    for (const std::string& recipe : ops::recipe_names()) {
      const ops::Explanation told = explain(recipe, device, flags);
      Json passes = Json::array();
      for (const ops::ExplainedPass& pass : told.passes)
        passes.push_back({{"pass", name(pass.pass)},
                          {"kernel", pass.kernel},
                          {"a", pass.a},
                          {"b", pass.b},
                          {"reason", pass.reason}});
      recipes.push_back({{"device", device.str()}, {"recipe", recipe}, {"passes", passes}});
    }
  return {{"version", MOXIE_VERSION},
          {"cuda", kHasCuda},
          {"cuda_archs", MOXIE_ARCHS},
          {"torch", TORCH_VERSION},
          {"torch_cuda", at::globalContext().hasCUDART()},
          {"cpu",
           {{"model", cpu.model},
            {"cores", cpu.cores},
            {"threads", cpu.threads},
            {"torch_threads", at::get_num_threads()},
            {"instruction_set", cpu.instruction_set}}},
          {"gpus", gpus},
          {"n", flags.n},
          {"k", flags.k},
          {"recipes", recipes}};
}

void print_machine() {
  std::printf("moxie %s, %s\n", MOXIE_VERSION,
              kHasCuda ? "CUDA kernels for " MOXIE_ARCHS : "built without CUDA kernels");
  std::printf("torch %s, %s\n", TORCH_VERSION,
              at::globalContext().hasCUDART() ? "with CUDA" : "without CUDA");
  const Cpu cpu = find_cpu();
  std::printf("CPU   %s: %ld cores, %ld threads, torch runs on %d of them; instruction set %s\n",
              cpu.model.c_str(), cpu.cores, cpu.threads, at::get_num_threads(),
              cpu.instruction_set.c_str());
  const std::vector<Gpu> gpus = find_gpus();
  for (size_t i = 0; i < gpus.size(); ++i) {
    const std::string why_not = why_not_used(gpus[i].capability);
    std::printf("GPU %zu %s: compute capability %s, %s%s\n", i, gpus[i].name.c_str(),
                capability_text(gpus[i].capability).c_str(),
                human_bytes(static_cast<double>(gpus[i].memory_bytes)).c_str(),
                why_not.empty() ? "" : ("; not used: " + why_not).c_str());
  }
  if (gpus.empty())
    std::printf("GPU   none found: recipes run on the CPU, with the same numerics as on a GPU\n");
}

void print_kernels(c10::Device device, const Flags& flags) {
  const std::vector<std::string> names = ops::recipe_names();
  size_t width = 0;
  for (const std::string& name : names) width = std::max(width, name.size());
  std::printf("\nKernels on %s for weights [experts, n, k] with n = %ld and k = %ld:\n",
              device.str().c_str(), flags.n, flags.k);
  const auto print = [&](const char* recipe, const char* kernel, const char* reason) {
    std::printf("%-*s  %-25s  %s\n", static_cast<int>(width), recipe, kernel, reason);
  };
  print("recipe", "forward", "why not a faster one");
  for (const std::string& name : names) {
    const ops::ExplainedPass forward = explain(name, device, flags).passes[0];
    print(name.c_str(), forward.kernel.c_str(),
          forward.reason.empty() ? "-" : forward.reason.c_str());
  }
}

void run(const Flags& flags) {
  if (flags.json) {
    std::printf("%s\n", to_json(flags).dump(2).c_str());
    return;
  }
  print_machine();
  for (const c10::Device device : devices()) print_kernels(device, flags);
  std::printf("\n%s\n", kKernels);
}

}  // namespace

void add_info(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("info", kWhat);
  command->footer(kMore);
  const CLI::Range sizes(int64_t{1}, int64_t{1} << 40, "NUMBER");
  command->add_option("--n", flags->n, "output width of the weights [2048]")->check(sizes);
  command->add_option("--k", flags->k, "input width of the weights [7168]")->check(sizes);
  command->add_flag("--json", flags->json, "print JSON");
  const std::shared_ptr<EpFlags> ep = add_ep_flags(*command);
  command->callback([flags, ep] {
    const Output output = flags->json ? Output::kJson : Output::kText;
    if (!ep->ep) return run(*flags);
    ep->published ? print_published(output) : print_ep_cost(*ep, output);
  });
}

}  // namespace moxie::cli
