#include "tests/support/moe_cases.h"

#include <sstream>

#include "moxie/core/permute/permute.h"
#include "moxie/core/route/route.h"
#include "moxie/core/split/finish_products.h"
#include "moxie/core/split/split.h"
#include "tests/support/input.h"

namespace moxie::testing {
namespace {

// Random expert ids: all 0, of two experts only, or of all experts.
std::vector<int32_t> random_ids(Random& random, int64_t count, int64_t experts) {
  std::vector<int32_t> ids(count);
  const int64_t spread = random.pick<int64_t>({1, 2, experts, experts});
  for (auto& id : ids) id = static_cast<int32_t>(random.below(min(spread, experts)));
  return ids;
}

struct Routed {
  int64_t tokens, k, experts, slots;
  std::vector<int32_t> ids, offs, slot_of, row_of;

  explicit Routed(Random& random)
      : tokens(random.chance(10) ? random.between(2000, 5000) : random.between(0, 200)),
        k(random.between(1, 8)),
        experts(random.pick<int64_t>({1, 2, 7, 64, 256, 1024})),
        slots(tokens * k),
        ids(random_ids(random, slots, experts)),
        offs(experts),
        slot_of(slots),
        row_of(slots) {
    route({.ids = {ids.data(), {tokens, k}},
           .offs = {offs.data(), {experts}},
           .slot_of = {slot_of.data(), {slots}},
           .row_of = {row_of.data(), {slots}},
           .workspace = {nullptr, {0}}},
          {.backend = Backend::kRef});
  }
};

}  // namespace

Case route_case(Random& random) {
  const Routed r(random);
  std::ostringstream text;
  text << "route [" << r.tokens << ", " << r.k << "] experts " << r.experts;
  auto run = [=](const Exec& exec) {
    Arena arena(exec.backend);
    const bool cuda = exec.backend == Backend::kCuda;
    const int64_t work = cuda ? route_workspace(r.slots, r.experts) : 0;
    Arena scratch(exec.backend);
    route({.ids = arena.input(r.ids, {r.tokens, r.k}),
           .offs = arena.output<int32_t>({r.experts}),
           .slot_of = arena.output<int32_t>({r.slots}),
           .row_of = arena.output<int32_t>({r.slots}),
           .workspace = scratch.output<int32_t>({work})},
          exec);
    return arena.results();
  };
  return {text.str(), r.slots, run};
}

Case top_k_case(Random& random) {
  const int64_t tokens = random.between(0, 300), experts = random.between(1, 300);
  const int64_t k = random.between(1, min<int64_t>(experts, 10));
  const auto scores = random_values<float>(random, tokens * experts, random_data(random));
  std::ostringstream text;
  text << "top_k [" << tokens << ", " << experts << "] k " << k;
  auto run = [=](const Exec& exec) {
    Arena arena(exec.backend);
    top_k({.scores = arena.input(scores, {tokens, experts}),
           .ids = arena.output<int32_t>({tokens, k})},
          exec);
    return arena.results();
  };
  return {text.str(), tokens * experts, run};
}

Case split_case(Random& random) {
  const int64_t rows = random.between(0, 200), cols = random.between(0, 150);
  const auto x = random_values<float>(random, rows * cols, random_data(random));
  SplitTerms terms{.count = static_cast<int>(random.between(1, kMaxSplitTerms))};
  for (auto& term : terms.term) term = static_cast<uint8_t>(random.below(kBf16Terms));
  const auto misalign = static_cast<int>(random.below(2));
  const int64_t copies = random.between(0, 3), experts = random.between(1, 40);
  const int64_t dim = random.between(0, 100);
  const auto w = random_values<bf16>(random, experts * dim, random_data(random));
  std::ostringstream text;
  text << "split [" << rows << ", " << cols << "] terms " << terms.count << ", " << copies
       << " copies of [" << experts << ", " << dim << ']';
  auto run = [=](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    SplitArgs args{.x = arena.input(x, {rows, cols}),
                   .terms = terms,
                   .out = arena.output<bf16>({rows, terms.count * cols})};
    if (copies > 0)
      args.copies = {.x = arena.input(w, {experts, dim}),
                     .out = arena.output<bf16>({copies * experts, dim})};
    split(args, exec);
    return arena.results();
  };
  return {text.str(), rows * cols, run};
}

// Values are finite, because results are compared byte for byte and NaN has many bit patterns.
Case finish_products_case(Random& random) {
  const int64_t tokens = random.between(0, 200), experts = random.between(1, 40);
  const int64_t dim = random.between(0, 150);
  const bool dx = random.chance(70), dweight = !dx || random.chance(70), add = random.chance(50);
  const Format format = random.chance(50) ? Format::kBf16 : Format::kF32;
  const auto product = random_values<float>(random, tokens * dim, Data::kGaussianLike);
  const auto other = random_values<bf16>(random, tokens * dim, Data::kGaussianLike);
  const auto terms = random_values<float>(random, kBf16Terms * experts * dim, Data::kGaussianLike);
  const auto misalign = static_cast<int>(random.below(2));
  std::ostringstream text;
  text << "finish_products" << (dx ? " dx" : "") << (dx && add ? " + other" : "") << " [" << tokens
       << ", " << dim << ']' << (dweight ? " dweight of " : " experts ") << experts << ' '
       << name(format);
  auto run = [=](const Exec& exec) {
    Arena arena(exec.backend, misalign);
    FinishProductsArgs args;
    if (dx) {
      args.dx = {.from = arena.input(product, {tokens, dim}),
                 .add = std::nullopt,
                 .to = arena.output<bf16>({tokens, dim})};
      if (add) args.dx->add = arena.input(other, {tokens, dim});
    }
    if (dweight)
      args.dweight = {.terms = arena.input(terms, {kBf16Terms, experts, dim}),
                      .to = arena.float_output(format, {experts, dim})};
    finish_products(args, exec);
    return arena.results();
  };
  return {text.str(), (tokens + experts) * dim, run};
}

// Runs permute, unpermute and unpermute_weights. Values are finite, because results are compared
// byte for byte and NaN has many bit patterns.
Case permute_case(Random& random) {
  const Routed r(random);
  const int64_t dim = random.between(0, 150);
  const bool weighted = random.chance(60);
  const Input x(random, r.tokens * dim, Data::kGaussianLike);
  Input rows(random, r.slots * dim, Data::kGaussianLike);
  while (rows.format != x.format) rows = Input(random, r.slots * dim, Data::kGaussianLike);
  const auto weights = random_values<float>(random, r.slots, Data::kGaussianLike);
  std::ostringstream text;
  text << "permute [" << r.tokens << ", " << dim << "] k " << r.k << (weighted ? " weighted" : "")
       << ' ' << name(x.format);
  auto run = [=](const Exec& exec) {
    Arena arena(exec.backend);
    const auto out = [&](Shape shape) { return arena.float_output(x.format, shape); };
    std::optional<View<const float>> factors;
    if (weighted) factors = arena.input(weights, {r.tokens, r.k});
    const auto slot_of = arena.input(r.slot_of, {r.slots});
    const auto row_of = arena.input(r.row_of, {r.slots});
    const auto x_view = x.in(arena, {r.tokens, dim}), rows_view = rows.in(arena, {r.slots, dim});
    permute({.x = x_view,
             .slot_of = slot_of,
             .top_k = r.k,
             .weights = factors,
             .rows = out({r.slots, dim})},
            exec);
    unpermute({.rows = rows_view, .row_of = row_of, .weights = factors, .x = out({r.tokens, dim})},
              exec);
    if (r.tokens > 0)
      unpermute_weights({.dout = x_view,
                         .rows = rows_view,
                         .row_of = row_of,
                         .dweights = arena.output<float>({r.tokens, r.k})},
                        exec);
    return arena.results();
  };
  return {text.str(), r.slots * dim, run};
}

}  // namespace moxie::testing
