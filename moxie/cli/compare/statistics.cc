#include "moxie/cli/compare/statistics.h"

#include <cmath>
#include <numbers>
#include <numeric>

#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

// P(|T| <= sqrt(degrees) tan(angle)) for Student's t: for an integer number of degrees it is a
// finite sum.
double probability_within(double angle, int64_t degrees) {
  const bool even = degrees % 2 == 0;
  const double cosine = std::cos(angle);
  double term = std::sin(angle) * (even ? 1 : cosine), sum = 0;
  for (int64_t k = even ? 2 : 3; k <= degrees; k += 2) {
    sum += term;
    term *= cosine * cosine * static_cast<double>(k - 1) / static_cast<double>(k);
  }
  return even ? sum : 2 * std::numbers::inv_pi * (angle + sum);
}

}  // namespace

double student_t(double probability, int64_t degrees) {
  MOXIE_CHECK(probability > 0 && probability < 1, "student_t: probability must be above 0 and ",
              "below 1, got ", probability);
  MOXIE_CHECK(degrees > 0, "student_t: degrees must be at least 1, got ", degrees);
  double low = 0, high = std::numbers::pi / 2;
  for (int halvings = 0; halvings < 64; ++halvings) {  // bisects to the last bit of a double
    const double angle = (low + high) / 2;
    (probability_within(angle, degrees) < probability ? low : high) = angle;
  }
  return std::sqrt(static_cast<double>(degrees)) * std::tan(low);
}

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::optional<Interval> interval_of_mean(std::span<const double> values) {
  if (values.size() < 2) return std::nullopt;
  const double center = mean(values);
  double squares = 0;
  for (const double value : values) squares += (value - center) * (value - center);
  const auto count = static_cast<double>(values.size()), degrees = count - 1;
  const double half =
      student_t(kConfidence, std::ssize(values) - 1) * std::sqrt(squares / degrees / count);
  return Interval{.low = center - half, .high = center + half};
}

}  // namespace moxie::cli
