// moxie compare: statistics, the plan of runs, the table, and which recipes fail a required limit.
#include "moxie/cli/compare/comparison.h"

#include <gmock/gmock.h>

#include <cmath>

#include "moxie/cli/compare/plan.h"
#include "moxie/cli/compare/statistics.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

// ---- statistics --------------------------------------------------------------------------------

// {degrees of freedom, two-sided 95 % quantile}, as printed in textbooks of statistics.
TEST(StudentT, MatchesThePrintedTable) {
  const std::pair<int64_t, double> table[] = {
      {1, 12.706}, {2, 4.303},  {3, 3.182},   {4, 2.776},    {5, 2.571},
      {6, 2.447},  {7, 2.365},  {8, 2.306},   {9, 2.262},    {10, 2.228},
      {15, 2.131}, {20, 2.086}, {25, 2.060},  {29, 2.045},   {30, 2.042},
      {40, 2.021}, {60, 2.000}, {120, 1.980}, {1000, 1.962}, {100000, 1.960}};
  for (const auto& [degrees, t] : table) EXPECT_NEAR(student_t(0.95, degrees), t, 5e-4) << degrees;
}

// With one degree of freedom the quantile is tan(pi p / 2) (a Cauchy distribution); with two it is
// p sqrt(2 / (1 - p^2)).
TEST(StudentT, IsExactIfTheQuantileHasAFormula) {
  for (const double p : {0.01, 0.5, 0.9, 0.95, 0.99, 0.999}) {
    EXPECT_NEAR(student_t(p, 1), std::tan(std::numbers::pi / 2 * p), 1e-9 * student_t(p, 1));
    EXPECT_NEAR(student_t(p, 2), p * std::sqrt(2 / (1 - p * p)), 1e-12 * student_t(p, 2));
  }
}

TEST(StudentT, RefusesWhatHasNoQuantile) {
  EXPECT_THAT([] { student_t(0.95, 0); }, ThrowsMessage<Error>(HasSubstr("at least 1, got 0")));
  EXPECT_THAT([] { student_t(1, 3); }, ThrowsMessage<Error>(HasSubstr("below 1, got 1")));
}

TEST(IntervalOfMean, IsMeanAndStudentsErrorOfIt) {
  const double values[] = {1, 2, 3, 4, 5};  // standard deviation sqrt(2.5), t 2.776
  const auto interval = interval_of_mean(values);
  ASSERT_TRUE(interval);
  EXPECT_NEAR(interval->low, 3 - 1.96324, 1e-5);
  EXPECT_NEAR(interval->high, 3 + 1.96324, 1e-5);
}

TEST(IntervalOfMean, TakesTwoValues) {
  EXPECT_FALSE(interval_of_mean({}));
  const double values[] = {2, 2};
  EXPECT_FALSE(interval_of_mean({values, 1}));
  EXPECT_EQ(interval_of_mean(values)->high, 2);  // no spread, no error
}

// ---- the plan ----------------------------------------------------------------------------------

Plan plan(Words recipes, int64_t seeds) {
  return {.config = {}, .recipes = std::move(recipes), .seeds = seeds};
}

TEST(Plan, RunsEveryRecipeOfASeedBeforeTheNextSeed) {
  const auto runs = runs_of(plan({"bf16", "experts=mxfp8_rceil+linears=bf16"}, 2));
  ASSERT_THAT(runs, SizeIs(4));
  EXPECT_EQ(runs[0].folder, "bf16-seed1");
  EXPECT_EQ(runs[1].folder, "experts-mxfp8_rceil-linears-bf16-seed1");
  EXPECT_EQ(runs[2].name, "bf16 seed 2");
  EXPECT_EQ(runs[3].config.seed, 2);
  EXPECT_THAT(runs[3].config.recipe, ElementsAre("experts=mxfp8_rceil", "linears=bf16"));
}

TEST(Plan, RefusesWhatMakesNoSense) {
  const auto refuses = [](Words recipes, int64_t seeds, const char* message) {
    EXPECT_THAT([&] { runs_of(plan(recipes, seeds)); }, ThrowsMessage<Error>(HasSubstr(message)));
  };
  refuses({}, 1, "--recipes must name at least one recipe");
  refuses({"bf16"}, 0, "--seeds must be 1 to 1000, got 0");
  refuses({"bf16", "bf16"}, 1, "'bf16' and 'bf16' would both be trained in 'bf16-seed1'");
  refuses({"a=b", "a:b"}, 1, "'a=b' and 'a:b' would both");
  refuses({"bf16+"}, 1, "there is an empty word in 'bf16+'");
  refuses({""}, 1, "there is an empty word in ''");
}

TEST(Plan, IsReadAsItWasWritten) {
  const Folder folder;
  Plan written = plan({"bf16", "mxfp8_rceil"}, 3);
  written.config = preset("small");
  written.config.lr = 0.25;
  written.config.data = {"a", "b"};
  const auto json = to_json(written);
  EXPECT_FALSE(json.at("config").contains("seed"));
  const Plan read = read_plan(folder.write("plan.json", json.dump()));
  EXPECT_EQ(read.config, written.config);
  EXPECT_EQ(read.recipes, written.recipes);
  EXPECT_EQ(read.seeds, 3);
}

TEST(Plan, SaysWhichFileIsDamaged) {
  const Folder folder;
  for (const char* text : {"", "[]", "{", R"({"recipes": 3})", R"({"config": {"preset": 1}})",
                           R"({"config": {"preset": "tiny"}, "recipes": ["a"], "seeds": "x"})"})
    EXPECT_THAT([&] { read_plan(folder.write("plan.json", text)); },
                ThrowsMessage<Error>(HasSubstr("plan.json")))
        << text;
}

// ---- the comparison ----------------------------------------------------------------------------

// The comparison that results if the runs of the plan, in their order, end with these held-out
// losses.
Comparison comparison(const Plan& plan, const std::vector<double>& losses) {
  std::vector<ComparedRun> runs;
  for (const PlannedRun& run : runs_of(plan))
    runs.push_back({.run = run,
                    .result = {.steps = 10,
                               .eval_loss = losses.at(runs.size()),
                               .bigram_entropy = 2.5,
                               .tokens_per_s = 1000.0 * static_cast<double>(run.seed),
                               .peak_memory_bytes = run.seed << 20,
                               .device = "cpu, 2 threads"}});
  return compare(plan, runs);
}

TEST(Comparison, PairsRunsOfTheSameSeed) {
  // Losses of seed 1: 1 (bf16) and 1.01 (mx, 1 % more); of seed 2: 2 and 2.06 (3 % more). Comparing
  // runs of different seeds would give differences of about 100 %.
  const auto compared = comparison(plan({"bf16", "mx"}, 2), {1, 1.01, 2, 2.06});
  const ComparedRecipe& mx = compared.recipes.at(1);
  EXPECT_NEAR(mx.runs[0].difference, 1, 1e-9);
  EXPECT_NEAR(mx.runs[1].difference, 3, 1e-9);
  EXPECT_NEAR(mx.difference, 2, 1e-9);
  EXPECT_NEAR(mx.interval->high, 2 + 12.7062, 1e-4);
  EXPECT_NEAR(mx.eval_loss, 1.535, 1e-9);
  EXPECT_EQ(mx.tokens_per_s, 1500);
  EXPECT_EQ(mx.peak_memory_bytes, 2 << 20);
  EXPECT_EQ(compared.recipes[0].difference, 0);
}

TEST(Comparison, RefusesRunsThatReadOtherText) {
  const Plan two = plan({"bf16", "mx"}, 1);
  const auto with = [&](const std::string& first, const std::string& second, double entropy) {
    const auto planned = runs_of(two);
    const Result a{.eval_loss = 1, .bigram_entropy = 2.5, .data_fingerprint = first};
    const Result b{.eval_loss = 1, .bigram_entropy = entropy, .data_fingerprint = second};
    return compare(two, {{.run = planned[0], .result = a}, {.run = planned[1], .result = b}});
  };
  EXPECT_THAT([&] { with("one", "two", 2.5); },
              ThrowsMessage<Error>(AllOf(HasSubstr("mx of seed 1 read other text than bf16"),
                                         HasSubstr("fingerprint is two, not one"))));
  EXPECT_THAT([&] { with("one", "", 2.25); },
              ThrowsMessage<Error>(HasSubstr("bigram entropy of what it held out is 2.25")));
  EXPECT_EQ(with("one", "", 2.5).bigram_entropy, 2.5) << "a run of before says no fingerprint";
}

TEST(Comparison, ShowsATable) {
  const auto two = text_of(comparison(plan({"bf16", "mx"}, 2), {1, 1.01, 2, 2.06}));
  EXPECT_THAT(two, AllOf(HasSubstr("bf16           1.5000        base"), HasSubstr("+2.00 %"),
                         HasSubstr("-10.71 % to +14.71 %"), HasSubstr("held-out text: 2.5000"),
                         HasSubstr("2 seeds"), HasSubstr("numerics, not speed")));
  const auto one = text_of(comparison(plan({"bf16", "mx"}, 1), {1, 0.99}));
  EXPECT_THAT(one, AllOf(HasSubstr("-1.00 %"), HasSubstr("1 seed."), Not(HasSubstr(" to "))));
}

TEST(Comparison, PrintsWordsForLossesThatAreNotFinite) {
  for (const double bad : std::vector<double>{NAN, -NAN, INFINITY}) {
    const auto text = text_of(comparison(plan({"bf16", "mx"}, 2), {1, 1, 1, bad}));
    EXPECT_THAT(text, AllOf(HasSubstr("not finite to not finite"), Not(HasSubstr("nan")),
                            Not(HasSubstr("inf"))));
  }
}

TEST(Comparison, HasEverySeedInItsJson) {
  const auto json = to_json(comparison(plan({"bf16", "mx"}, 2), {1, 1.01, 2, NAN}));
  const auto& mx = json.at("recipes").at(1);
  EXPECT_EQ(json.at("base"), "bf16");
  EXPECT_EQ(json.at("numerics_only"), true);
  EXPECT_EQ(mx.at("runs").at(0).at("folder"), "mx-seed1");
  EXPECT_NEAR(mx.at("runs").at(0).at("difference_percent").get<double>(), 1, 1e-9);
  EXPECT_THAT(json.dump(), HasSubstr(R"("seed":2,"folder":"mx-seed2","eval_loss":null)"));
}

TEST(Requirement, IsOnTheUpperEndOfTheInterval) {
  const auto compared = comparison(plan({"bf16", "mx"}, 2), {1, 1.01, 1, 1.01});
  EXPECT_THAT(recipes_above(compared, 1.01), IsEmpty());
  EXPECT_THAT(recipes_above(compared, 0.5),
              ElementsAre(AllOf(HasSubstr("mx may be 1.00 % above bf16's"),
                                HasSubstr("0.50 % more than the 0.5 % allowed"))));
  // The mean difference, 1.5 %, is below the limit of 5 %. But with seeds that differ by 1 % and 2
  // % the interval ends above it.
  EXPECT_THAT(recipes_above(comparison(plan({"bf16", "mx"}, 2), {1, 1.01, 1, 1.02}), 5), SizeIs(1));
}

TEST(Requirement, FailsWithoutAnIntervalAndWithoutANumber) {
  EXPECT_THAT(recipes_above(comparison(plan({"bf16", "mx"}, 1), {1, 1}), 1), SizeIs(1));
  EXPECT_THAT(recipes_above(comparison(plan({"bf16", "mx"}, 2), {1, 1, 1, NAN}), 1), SizeIs(1));
  EXPECT_THAT(recipes_not_learned(comparison(plan({"bf16", "mx"}, 1), {1, NAN})), SizeIs(1));
}

TEST(Requirement, ToHaveLearnedHoldsForTheBaseToo) {
  EXPECT_THAT(recipes_not_learned(comparison(plan({"bf16", "mx"}, 1), {2.6, 2.4})),
              ElementsAre(AllOf(HasSubstr("bf16 is 2.6000"), HasSubstr("2.5000"))));
}

}  // namespace
}  // namespace moxie::testing
