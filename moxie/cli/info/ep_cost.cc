#include "moxie/cli/info/ep_cost.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kLargestPublished = 256;  // no published time of a larger group was found

// The ways to send tokens that the tables compare. Moxie sends a token to a rank once (`once`); the
// variants without show what that saves.
struct Variant {
  const char* name;  // key in JSON
  const char* title;
  WireFormat wire;
  bool once_per_rank;
};
constexpr std::array<Variant, 4> kVariants = {{
    {"bf16", "bf16", WireFormat::kBf16, false},
    {"bf16_once", "bf16 once", WireFormat::kBf16, true},
    {"fp8", "FP8", WireFormat::kFp8, false},
    {"fp8_once", "FP8 once", WireFormat::kFp8, true},
}};
constexpr std::array<const char*, 4> kLegNames = {"dispatch_x", "combine_y", "dispatch_dy",
                                                  "combine_dx"};

struct Size {
  int64_t ranks = 0, experts = 0;
  std::array<ExchangeCost, kVariants.size()> costs;

  bool is_extrapolated() const { return ranks > kLargestPublished; }
  std::string label() const { return std::to_string(ranks) + (is_extrapolated() ? " *" : ""); }
};

void check(const EpFlags& flags, int64_t ranks) {
  const int64_t domain = flags.layer.cluster.domain;
  const auto& [experts, top_k, groups, kept_groups] = flags.layer.odds;
  MOXIE_CHECK(top_k <= experts, "info: --top-k must be at most the ", experts, " experts, got ",
              top_k);
  MOXIE_CHECK(experts % groups == 0, "info: --groups must divide the ", experts, " experts, got ",
              groups);
  MOXIE_CHECK(kept_groups <= groups, "info: --kept-groups must be at most the ", groups,
              " groups, got ", kept_groups);
  MOXIE_CHECK(top_k <= kept_groups * (experts / groups), "info: --kept-groups must hold the ",
              top_k, " experts of a token, got ", kept_groups, " of ", experts / groups, " each");
  MOXIE_CHECK(ranks > experts || experts % ranks == 0, "info: --experts must be a multiple of EP ",
              ranks, ", got ", experts);
  MOXIE_CHECK(ranks <= domain || ranks % domain == 0, "info: --domain must divide EP ", ranks,
              ", got ", domain);
}

// The costs at one size of the EP group. If it has more ranks than the layer has experts, the model
// gets one expert per rank.
Size size_of(const EpFlags& flags, int64_t ranks) {
  check(flags, ranks);
  Size size{.ranks = ranks, .experts = std::max(flags.layer.odds.experts, ranks), .costs = {}};
  ExchangeCostArgs args = flags.layer;
  args.odds.experts = size.experts;
  args.cluster.ranks = ranks;
  args.cluster.nvlink = flags.nvlink_gb_per_s * 1e9;
  args.cluster.nic = flags.nic_gb_per_s * 1e9;
  args.flops_per_second = flags.tflops * 1e12;
  args.fit.seconds_per_peer = flags.us_per_peer * 1e-6;
  for (size_t i = 0; i < kVariants.size(); ++i) {
    args.wire = kVariants[i].wire;
    args.once_per_rank = kVariants[i].once_per_rank;
    size.costs[i] = exchange_cost(args);
  }
  return size;
}

// The smallest group in the table whose legs take longer than the products, so that overlap cannot
// hide the legs; absent if there is none.
std::optional<int64_t> break_even(const std::vector<Size>& sizes, size_t variant) {
  for (const Size& size : sizes)
    if (size.costs[variant].seconds() > size.costs[variant].products_seconds) return size.ranks;
  return std::nullopt;
}

const char* name_of(Path path) { return path == Path::kDirect ? "direct" : "forwarded"; }

Json to_json(const ExchangeCost& cost) {
  Json legs = Json::array();
  for (size_t i = 0; i < cost.legs.size(); ++i)
    legs.push_back({{"leg", kLegNames[i]},
                    {"rows", cost.legs[i].rows},
                    {"bytes", cost.legs[i].bytes.all},
                    {"nvlink_bytes", cost.legs[i].bytes.nvlink},
                    {"nic_bytes", cost.legs[i].bytes.nic},
                    {"seconds", cost.legs[i].seconds}});
  return {{"bytes", cost.bytes()},
          {"seconds", cost.seconds()},
          {"exposed", cost.exposed()},
          {"exposed_overlapped", cost.exposed_overlapped()},
          {"legs", legs}};
}

Json to_json(const EpFlags& flags, const std::vector<Size>& sizes) {
  Json rows = Json::array(), break_evens;
  for (const Size& size : sizes) {
    Json wires;
    for (size_t i = 0; i < kVariants.size(); ++i) wires[kVariants[i].name] = to_json(size.costs[i]);
    rows.push_back({{"ep", size.ranks},
                    {"experts", size.experts},
                    {"extrapolated", size.is_extrapolated()},
                    {"ranks_per_token", size.costs[0].ranks_per_token},
                    {"products_seconds", size.costs[0].products_seconds},
                    {"wires", wires}});
  }
  for (size_t i = 0; i < kVariants.size(); ++i) {
    const std::optional<int64_t> ranks = break_even(sizes, i);
    break_evens[kVariants[i].name] = ranks ? Json(*ranks) : Json(nullptr);
  }
  const ExchangeCostArgs& layer = flags.layer;
  return {{"tokens", layer.tokens},
          {"dim", layer.dim},
          {"hidden", layer.hidden},
          {"experts", layer.odds.experts},
          {"top_k", layer.odds.top_k},
          {"groups", layer.odds.groups},
          {"kept_groups", layer.odds.kept_groups},
          {"block", layer.block},
          {"path", name_of(layer.path)},
          {"imbalance", layer.imbalance},
          {"domain", layer.cluster.domain},
          {"nvlink_gb_per_s", flags.nvlink_gb_per_s},
          {"nic_gb_per_s", flags.nic_gb_per_s},
          {"tflops", flags.tflops},
          {"fit",
           {{"nvlink_share", layer.fit.nvlink_share},
            {"nic_share", layer.fit.nic_share},
            {"seconds", layer.fit.seconds},
            {"seconds_per_peer", flags.us_per_peer * 1e-6}}},
          {"break_even", break_evens},
          {"sizes", rows}};
}

std::string percent(double share) { return fixed(100 * share, 0) + " %"; }

void print_comparison(const std::vector<Size>& sizes) {
  std::printf(
      "\nWhat a rank sends in the four legs of forward and backward, and how long they take:\n");
  std::vector<std::string> header = {"EP", "ranks per token"};
  for (const char* unit : {", MB", ", ms"})
    for (const Variant& variant : kVariants) header.push_back(variant.title + std::string(unit));
  Table table(header);
  for (const Size& size : sizes) {
    std::vector<std::string> row = {size.label(), fixed(size.costs[0].ranks_per_token, 2)};
    for (const ExchangeCost& cost : size.costs) row.push_back(fixed(cost.bytes() / 1e6, 0));
    for (const ExchangeCost& cost : size.costs) row.push_back(fixed(cost.seconds() * 1e3, 2));
    table.add(row);
  }
  std::printf("%s", table.text().c_str());
}

void print_exposed(const std::vector<Size>& sizes) {
  std::printf(
      "\nShare of the time in which links work and products wait; overlapped: with all the "
      "overlap\n"
      "that there can be:\n");
  std::vector<std::string> header = {"EP"};
  for (const char* how : {"", ", overlapped"})
    for (const Variant& variant : kVariants) header.push_back(variant.title + std::string(how));
  Table table(header);
  for (const Size& size : sizes) {
    std::vector<std::string> row = {size.label()};
    for (const ExchangeCost& cost : size.costs) row.push_back(percent(cost.exposed()));
    for (const ExchangeCost& cost : size.costs) row.push_back(percent(cost.exposed_overlapped()));
    table.add(row);
  }
  std::printf("%s", table.text().c_str());
}

// Prints each leg with the wire that --wire names, where a token is sent to a rank once.
void print_legs(const EpFlags& flags, const std::vector<Size>& sizes) {
  size_t chosen = 0;
  for (size_t i = 0; i < kVariants.size(); ++i)
    if (kVariants[i].wire == flags.wire && kVariants[i].once_per_rank) chosen = i;
  std::printf("\nEach leg with %s per rank:\n", kVariants[chosen].title);
  Table table({"EP", "x, MB", "y, MB", "dy, MB", "dx, MB", "x, ms", "y, ms", "dy, ms", "dx, ms"});
  for (const Size& size : sizes) {
    std::vector<std::string> row = {size.label()};
    for (const LegCost& leg : size.costs[chosen].legs) row.push_back(fixed(leg.bytes.all / 1e6, 1));
    for (const LegCost& leg : size.costs[chosen].legs) row.push_back(fixed(leg.seconds * 1e3, 3));
    table.add(row);
  }
  std::printf("%s", table.text().c_str());
}

void print_text(const EpFlags& flags, const std::vector<Size>& sizes) {
  const ExchangeCostArgs& layer = flags.layer;
  std::printf(
      "Expert parallelism of a layer: %ld tokens per rank, dim %ld, hidden %ld, top %ld of %ld "
      "experts",
      layer.tokens, layer.dim, layer.hidden, layer.odds.top_k, layer.odds.experts);
  if (layer.odds.kept_groups < layer.odds.groups)
    std::printf(" in %ld of %ld groups", layer.odds.kept_groups, layer.odds.groups);
  std::printf(
      ";\nNVLink %s GB/s among %ld ranks, NIC %s GB/s beyond, rows %s, imbalance %s. The experts'\n"
      "products take %s ms at %s TFLOPS.\n",
      short_number(flags.nvlink_gb_per_s).c_str(), layer.cluster.domain,
      short_number(flags.nic_gb_per_s).c_str(), name_of(layer.path),
      short_number(layer.imbalance).c_str(),
      fixed(sizes[0].costs[0].products_seconds * 1e3, 2).c_str(),
      short_number(flags.tflops).c_str());
  print_comparison(sizes);
  print_exposed(sizes);
  print_legs(flags, sizes);
  std::printf("\n");
  for (size_t i = 0; i < kVariants.size(); ++i) {
    const std::optional<int64_t> ranks = break_even(sizes, i);
    std::printf(
        "%s: %s\n", kVariants[i].title,
        ranks ? ("from EP " + std::to_string(*ranks) + " on the legs take longer than the products")
                    .c_str()
              : "the products take longer than the legs at every EP of the table");
  }
  if (std::any_of(sizes.begin(), sizes.end(),
                  [](const Size& size) { return size.is_extrapolated(); }))
    std::printf("* extrapolated: no times above EP %ld were published%s\n", kLargestPublished,
                sizes.back().experts > layer.odds.experts
                    ? "; one expert per rank where there are fewer experts than ranks"
                    : "");
  std::printf(
      "bf16, FP8: the wire of x and dy; y and dx are bf16. once: a token goes to a rank once, as\n"
      "Moxie sends it, not once for each of its experts there. Links give %s (NVLink) and %s "
      "(NIC)\n"
      "of their speed: a fit of published times (--published; docs/COST_MODEL.md).\n",
      percent(layer.fit.nvlink_share).c_str(), percent(layer.fit.nic_share).c_str());
}

}  // namespace

void print_ep_cost(const EpFlags& flags, Output output) {
  std::vector<int64_t> ranks = flags.sizes;
  std::sort(ranks.begin(), ranks.end());
  std::vector<Size> sizes;
  for (const int64_t one : ranks) sizes.push_back(size_of(flags, one));
  if (output == Output::kJson)
    std::printf("%s\n", to_json(flags, sizes).dump(2).c_str());
  else
    print_text(flags, sizes);
}

}  // namespace moxie::cli
