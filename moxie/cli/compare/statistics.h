// What a few paired runs say about a difference.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace moxie::cli {

constexpr double kConfidence = 0.95;

// The t that |T| stays below with this probability, for Student's T of that many degrees of
// freedom.
double student_t(double probability, int64_t degrees);

double mean(std::span<const double> values);

struct Interval {
  double low = 0, high = 0;
};
// Of the mean of what the values are drawn from, at kConfidence; nothing to say of fewer than two.
std::optional<Interval> interval_of_mean(std::span<const double> values);

}  // namespace moxie::cli
