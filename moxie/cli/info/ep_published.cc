#include "moxie/cli/info/ep_published.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "moxie/cli/text.h"
#include "moxie/core/cost/published_legs.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

// The magnitudes of relative errors.
struct Errors {
  std::vector<double> sorted;

  void add(double error) {
    sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), std::abs(error)), std::abs(error));
  }
  double median() const {
    const size_t half = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
  double worst() const { return sorted.back(); }
};

struct Point {
  const PublishedLeg* leg;
  double published, modelled;  // seconds
  bool is_held_back;

  double error() const { return modelled / published - 1; }
};

std::vector<Point> points_of(const LinkFit& fit) {
  std::vector<Point> points;
  for (size_t i = 0; i < published_legs().size(); ++i) {
    const PublishedLeg& leg = published_legs()[i];
    points.push_back({&leg, published_seconds(leg), modelled_seconds(leg, fit), is_held_back(i)});
  }
  return points;
}

Errors errors_of(const std::vector<Point>& points, bool held_back) {
  Errors errors;
  for (const Point& point : points)
    if (point.is_held_back == held_back) errors.add(point.error());
  return errors;
}

Errors errors_of(const PublishedBytes& bytes) {
  Errors errors;
  for (const int64_t logged : bytes.logged)
    errors.add(modelled_bytes(bytes) / static_cast<double>(logged) - 1);
  return errors;
}

std::string word_of(const PublishedLeg& leg) {
  return leg.leg == Leg::kDispatchX ? "dispatch" : "combine";
}

Json to_json(const Errors& errors) {
  return {{"count", errors.sorted.size()}, {"median", errors.median()}, {"worst", errors.worst()}};
}

// The errors on the points usually fitted, when the other half of the points is fitted instead.
Errors swapped_errors() {
  return errors_of(points_of(fit_links(Half::kHeldBack)), /*held_back=*/false);
}

void print_json(const LinkFit& fit, const std::vector<Point>& points) {
  Json rows = Json::array();
  for (const Point& point : points)
    rows.push_back({{"series", point.leg->series->name},
                    {"source", point.leg->series->source},
                    {"ep", point.leg->ranks},
                    {"leg", word_of(*point.leg)},
                    {"row_bytes", point.leg->row_bytes},
                    {"published_seconds", point.published},
                    {"modelled_seconds", point.modelled},
                    {"held_back", point.is_held_back}});
  const PublishedBytes bytes = published_bytes();
  const Json all = {{"fit",
                     {{"nvlink_share", fit.nvlink_share},
                      {"nic_share", fit.nic_share},
                      {"seconds", fit.seconds},
                      {"seconds_per_peer", fit.seconds_per_peer}}},
                    {"fitted", to_json(errors_of(points, /*held_back=*/false))},
                    {"held_back", to_json(errors_of(points, /*held_back=*/true))},
                    {"swapped", to_json(swapped_errors())},
                    {"bytes",
                     {{"series", bytes.series->name},
                      {"source", bytes.series->source},
                      {"ep", bytes.ranks},
                      {"row_bytes", bytes.row_bytes},
                      {"logged", bytes.logged},
                      {"modelled", modelled_bytes(bytes)},
                      {"errors", to_json(errors_of(bytes))}}},
                    {"points", rows}};
  std::printf("%s\n", all.dump(2).c_str());
}

void print_errors(const char* what, const Errors& errors) {
  std::printf("%s: %zu, median error %s %%, worst %s %%\n", what, errors.sorted.size(),
              fixed(100 * errors.median(), 1).c_str(), fixed(100 * errors.worst(), 1).c_str());
}

void print_text(const LinkFit& fit, const std::vector<Point>& points) {
  Table table(
      {"published by", "EP", "leg", "row, bytes", "us", "model, us", "error, %", "held back"});
  std::vector<const PublishedSeries*> sources;
  for (const Point& point : points) {
    const PublishedLeg& leg = *point.leg;
    if (std::find(sources.begin(), sources.end(), leg.series) == sources.end())
      sources.push_back(leg.series);
    table.add({std::string(leg.series->name), std::to_string(leg.ranks), word_of(leg),
               fixed(leg.row_bytes, 0), fixed(point.published * 1e6, 0),
               fixed(point.modelled * 1e6, 0), fixed(100 * point.error(), 1),
               point.is_held_back ? "yes" : ""});
  }
  std::printf(
      "%s\nFit of every second point: NVLink gives %s of its speed, a NIC %s; a leg takes %s us "
      "more,\nand %s us for each peer.\n",
      table.text().c_str(), fixed(fit.nvlink_share, 3).c_str(), fixed(fit.nic_share, 3).c_str(),
      fixed(fit.seconds * 1e6, 1).c_str(), fixed(fit.seconds_per_peer * 1e6, 3).c_str());
  print_errors("fitted", errors_of(points, /*held_back=*/false));
  print_errors("held back", errors_of(points, /*held_back=*/true));
  print_errors("with the halves exchanged", swapped_errors());
  print_errors("bytes of a log of ranks", errors_of(published_bytes()));
  std::printf("\nSources:\n");
  for (const PublishedSeries* series : sources)
    std::printf("%s: %s\n", std::string(series->name).c_str(), std::string(series->source).c_str());
}

}  // namespace

void print_published(Output output) {
  const LinkFit fit = fit_links();
  const std::vector<Point> points = points_of(fit);
  if (output == Output::kJson)
    print_json(fit, points);
  else
    print_text(fit, points);
}

}  // namespace moxie::cli
