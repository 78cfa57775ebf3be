// report.html of a comparison, drawn by Python.
#pragma once

#include <string>

#include "moxie/cli/compare/plan.h"
#include "moxie/cli/process/children.h"

namespace moxie::cli {

// From compare.json and the metrics of the runs. False, with a line on stderr, where there is no
// Python; without matplotlib the report has no pictures, and a line says so.
bool write_report(const CompareFolder& folder, Children& children);

}  // namespace moxie::cli
