// Statistics over a few runs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace moxie::cli {

constexpr double kConfidence = 0.95;

// The two-sided quantile of Student's t: P(|T| <= t) = probability.
double student_t(double probability, int64_t degrees);

double mean(std::span<const double> values);

struct Interval {
  double low = 0, high = 0;
};
// The confidence interval of the mean, at kConfidence; absent for fewer than two values.
std::optional<Interval> interval_of_mean(std::span<const double> values);

}  // namespace moxie::cli
