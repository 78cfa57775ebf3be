#include "moxie/cli/info/ep_flags.h"

#include <map>
#include <string>

#include "moxie/cli/text.h"

namespace moxie::cli {
namespace {

// TFLOPS of the experts' products as measured on an H200: mxfp8_rceil_128, forward and backward
// with all quantization, sustained, 65536 rows in 32 groups, w13 and w2 of DeepSeek-V3
// (bench/results/nvidia-h200/grouped_mm.json, grouped_mm_w2.json).
constexpr double kH200Tflops = 935;

}  // namespace

std::shared_ptr<EpFlags> add_ep_flags(CLI::App& command) {
  auto flags = std::make_shared<EpFlags>();
  flags->tflops = kH200Tflops;
  ExchangeCostArgs& layer = flags->layer;
  CLI::Option* ep = command.add_flag("--ep", flags->ep, "what expert parallelism's exchange costs");
  const CLI::Range sizes(int64_t{1}, int64_t{1} << 20, "NUMBER");  // so products of them fit 64
                                                                   // bits
  const CLI::Range speeds(1e-3, 1e6, "NUMBER");
  const auto number = [&](const char* name, int64_t& value, const std::string& what) {
    command.add_option(name, value, what + " [" + std::to_string(value) + "]")
        ->check(sizes)
        ->needs(ep);
  };
  const auto speed = [&](const char* name, double& value, const std::string& what) {
    command.add_option(name, value, what + " [" + short_number(value) + "]")
        ->check(speeds)
        ->needs(ep);
  };
  command.add_option("--ep-sizes", flags->sizes, "sizes of the group [8 16 .. 2048]")
      ->check(sizes)
      ->needs(ep);
  number("--tokens", layer.tokens, "tokens of a rank");
  number("--dim", layer.dim, "width of a token");
  number("--hidden", layer.hidden, "hidden width of an expert");
  number("--experts", layer.odds.experts, "experts of the layer");
  number("--top-k", layer.odds.top_k, "experts of a token");
  number("--groups", layer.odds.groups, "groups of experts of the router");
  number("--kept-groups", layer.odds.kept_groups, "groups that a token may choose from");
  number("--block", layer.block, "elements that share a scale on an FP8 wire");
  command
      .add_option("--wire", flags->wire, "wire of x and dy in the table of legs: fp8, bf16 [fp8]")
      ->transform(CLI::CheckedTransformer(std::map<std::string, WireFormat>{
          {"fp8", WireFormat::kFp8}, {"bf16", WireFormat::kBf16}}))
      ->needs(ep);
  command
      .add_option("--path", layer.path,
                  "of x and dy: direct, or forwarded inside the domain of the receiver [direct]")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Path>{{"direct", Path::kDirect}, {"forwarded", Path::kForwarded}}))
      ->needs(ep);
  number("--domain", layer.cluster.domain, "ranks that NVLink joins");
  speed("--nvlink", flags->nvlink_gb_per_s, "GB/s of a GPU's NVLink, one direction");
  speed("--nic", flags->nic_gb_per_s, "GB/s of a GPU's NIC, one direction");
  speed("--tflops", flags->tflops, "of the experts' products; the default was measured on an H200");
  command
      .add_option("--us-per-peer", flags->us_per_peer, "microseconds of a leg for each peer [0]")
      ->check(CLI::Range(0., 1e6, "NUMBER"))
      ->needs(ep);
  command.add_option("--imbalance", layer.imbalance, "rows of the fullest rank over the mean [1]")
      ->check(CLI::Range(1., 1e6, "NUMBER"))
      ->needs(ep);
  command.add_flag("--published", flags->published, "the published times beside the model's")
      ->needs(ep);
  return flags;
}

}  // namespace moxie::cli
