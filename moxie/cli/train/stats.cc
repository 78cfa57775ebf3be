#include "moxie/cli/train/stats.h"

#include <cmath>

#include "moxie/torch/recipe.h"
#include "moxie/torch/stats.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

// An operand of a product, with its name in the metrics. In an MLP's two products, x and w13 give
// h, and h (after SwiGLU) and w2 give y; their gradients are dh and dy. The transposed forms are
// left out, because they differ little.
struct NamedOperand {
  int64_t product, part;  // indices into Quantizable::stats()
  std::string name;
};

std::vector<NamedOperand> operands_of(const nn::Quantizable& module) {
  enum : int64_t { kX = 0, kW = 1, kDy = 4 };  // positions in kStatsParts
  if (module.products().size() == 1) return {{0, kX, "x"}, {0, kW, "weight"}, {0, kDy, "dy"}};
  return {{0, kX, "x"}, {0, kW, "w13"}, {0, kDy, "dh"},
          {1, kX, "h"}, {1, kW, "w2"},  {1, kDy, "dy"}};
}

}  // namespace

Stats::Stats(LanguageModelImpl& model) : model_(model) {
  for (const auto& item : model.named_modules()) {
    auto* quantizable = dynamic_cast<nn::Quantizable*>(item.value().get());
    if (quantizable == nullptr || !ops::parse_recipe(quantizable->recipe(), "stats").quantizes())
      continue;
    quantizable->reset_stats();
    quantizable->collect_stats(true);
    modules_.push_back({item.key(), quantizable});
  }
}

Stats::~Stats() {
  for (const Module& module : modules_) module.quantizable->collect_stats(false);
}

void Stats::count_load() {
  model_.each_moe([&](const std::string& name, nn::MoeImpl& moe) {
    loads_.push_back({name, moe.router->load().clone()});
  });
}

void Stats::write(int64_t step, Metrics& metrics) const {
  for (const Load& load : loads_) {
    const at::Tensor counts = load.counts.cpu();
    const int64_t* first = counts.const_data_ptr<int64_t>();
    metrics.write({{"event", "load"},
                   {"step", step},
                   {"name", load.name},
                   {"counts", std::vector<int64_t>(first, first + counts.numel())}});
  }
  for (const Module& module : modules_) {
    const at::Tensor stats = module.quantizable->stats().cpu(), decibels = sqnr(stats);
    for (const NamedOperand& operand : operands_of(*module.quantizable)) {
      const at::Tensor of_part = stats[operand.product][operand.part];
      const auto share = [&](int64_t which) {
        return of_part[which].item<double>() / of_part[kNumStats - 1].item<double>();
      };
      const double db = decibels[operand.product][operand.part].item<double>();
      metrics.write({{"event", "quantization"},
                     {"step", step},
                     {"name", module.name},
                     {"tensor", operand.name},
                     // null if nothing is lost (infinite), or if all values are 0 (NaN)
                     {"sqnr_db", std::isfinite(db) ? Json(db) : Json()},
                     {"flushed", share(2)},
                     {"clipped", share(3)}});
    }
  }
}

}  // namespace moxie::cli
