// report.html of a comparison, written by a Python script.
#pragma once

#include <string>

#include "moxie/cli/compare/plan.h"
#include "moxie/cli/process/children.h"

namespace moxie::cli {

// Writes the report from compare.json and the metrics of the runs. Without Python, prints a line on
// stderr and returns false; without matplotlib, the report has no pictures, and a line says so.
bool write_report(const CompareFolder& folder, Children& children);

}  // namespace moxie::cli
