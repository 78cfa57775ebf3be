// Writes report.html of a comparison, by running a Python script.
#pragma once

#include <string>

#include "moxie/cli/compare/plan.h"
#include "moxie/cli/process/children.h"

namespace moxie::cli {

// Writes the report from compare.json and the metrics of the runs. If there is no Python or it
// fails, prints a line on stderr and returns false; without matplotlib the report has no pictures,
// and a line on stderr says so.
bool write_report(const CompareFolder& folder, Children& children);

}  // namespace moxie::cli
