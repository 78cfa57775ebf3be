#include "moxie/cli/inspect/print.h"

#include <cmath>
#include <sstream>

#include "moxie/cli/file/json.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/saved.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNotMeasured =
    "No tensor was measured: recipes are for float tensors of 2 or 3 dims, whose rows have at most "
    "65,536 elements where there are 128 of them.\n";

struct Total {
  int64_t bytes = 0, elements = 0;
  std::vector<Quality> qualities;
  bool is_measured = false;
};

Total total_of(const Inspection& inspection) {
  Total total{.qualities = std::vector<Quality>(inspection.recipes.size())};
  for (const InspectedTensor& tensor : inspection.tensors) {
    total.bytes += std::ssize(tensor.entry.bytes);
    total.elements += std::ssize(tensor.entry.bytes) / bytes_per_element(tensor.entry.dtype);
    for (size_t i = 0; i < tensor.qualities.size(); ++i)
      total.qualities[i].add(tensor.qualities[i]);
    total.is_measured |= !tensor.qualities.empty();
  }
  return total;
}

// ---- text --------------------------------------------------------------------------------------

std::string bytes_text(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return std::string("[").append(join(sizes, ", ")).append("]");
}

std::string sqnr_text(const Quality& quality) {
  return quality.noise == 0 ? "exact" : fixed(quality.sqnr_db(), 2);
}

std::string share_text(double part, double count) {
  const double percent = 100 * part / count;
  if (part == 0) return "0 %";
  return percent < 0.001 ? "< 0.001 %" : fixed(percent, 3) + " %";
}

std::string range_text(const Quality& quality) {
  if (!quality.has_scales()) return "-";
  std::ostringstream text;
  text << "2^" << quality.smallest;
  if (quality.smallest < quality.largest) text << " .. 2^" << quality.largest;
  return text.str();
}

std::string about_checkpoint(const Inspection& inspection) {
  try {
    const Saved saved = saved_of(inspection.path, inspection.file);
    const Config& config = saved.config;
    const Position& at = saved.position;
    std::ostringstream text;
    text << "checkpoint of moxie train: step " << at.step << " of " << config.steps << ", "
         << at.window << " windows read of data " << plain(at.data_fingerprint) << ", "
         << human_time(at.seconds) << " of training\n"
         << "preset " << config.preset << ", recipe " << plain(join(config.recipe, " "))
         << ", seed " << config.seed << "; dim " << config.dim << ", " << config.layers
         << " layers, " << config.experts << " experts, top " << config.top_k << ", hidden "
         << config.hidden_dim << "\n";
    return text.str();
  } catch (const Error& error) {  // not fatal: the tensors are still printed
    return plain(error.what()) + "\n";
  }
}

std::string about(const Inspection& inspection) {
  const Safetensors& file = inspection.file;
  std::string text = plain(inspection.path) + ": " + bytes_text(std::ssize(file.file.bytes())) +
                     ", " + std::to_string(file.tensors.size()) + " tensors, " +
                     (file.has_checksum ? "checksum right" : "no checksum") + "\n";
  for (const auto& [key, value] : file.metadata)
    if (!key.starts_with("moxie.")) text += printable(key) + ": " + printable(value) + "\n";
  return file.metadata.contains(kCheckpointKey) ? text + about_checkpoint(inspection) : text;
}

std::string list(const Inspection& inspection, const Total& total) {
  Table table({"tensor", "shape", "dtype", "size"});
  for (const auto& [entry, not_finite, outside_f32, qualities] : inspection.tensors)
    table.add({printable(entry.name), printable(shape_text(entry.shape)), entry.dtype,
               bytes_text(std::ssize(entry.bytes))});
  table.add({std::to_string(inspection.tensors.size()) + " tensors in all",
             human_count(static_cast<double>(total.elements)) + " elements", "",
             bytes_text(total.bytes)});
  return table.text();
}

std::string qualities(const Inspection& inspection, const Total& total) {
  Table table({"as weights", "SQNR, dB", "flushed", "clipped", "scales"});
  const auto add = [&](const std::string& name, const std::vector<Quality>& measured) {
    table.add({name});
    for (size_t i = 0; i < measured.size(); ++i) {
      const Quality& quality = measured[i];
      table.add({"  " + inspection.recipes[i], sqnr_text(quality),
                 share_text(quality.flushed, quality.count),
                 share_text(quality.clipped, quality.count), range_text(quality)});
    }
  };
  int64_t count = 0;
  for (const auto& [entry, not_finite, outside_f32, measured] : inspection.tensors) {
    if (measured.empty()) continue;
    ++count;
    std::string name = printable(entry.name);
    if (not_finite > 0)
      name.append(": ").append(std::to_string(not_finite)).append(" elements are not finite");
    if (outside_f32 > 0)
      name.append(": ").append(std::to_string(outside_f32)).append(" elements are outside of F32");
    add(name, measured);
  }
  add(std::to_string(count) + " tensors together", total.qualities);
  return table.text();
}

// ---- JSON --------------------------------------------------------------------------------------

Json quality_json(const Quality& quality) {
  Json json = {{"sqnr_db", quality.sqnr_db()},  // null if not finite
               {"flushed", quality.flushed / quality.count},
               {"clipped", quality.clipped / quality.count},
               {"smallest_exponent", nullptr},
               {"largest_exponent", nullptr}};
  if (!std::isfinite(quality.sqnr_db())) json["sqnr_db"] = nullptr;
  if (quality.has_scales()) {
    json["smallest_exponent"] = quality.smallest;
    json["largest_exponent"] = quality.largest;
  }
  return json;
}

Json qualities_json(const Inspection& inspection, const std::vector<Quality>& measured) {
  Json json = Json::object();
  for (size_t i = 0; i < measured.size(); ++i)
    json[inspection.recipes[i]] = quality_json(measured[i]);
  return json;
}

Json checkpoint_json(const Inspection& inspection) {
  const auto found = inspection.file.metadata.find(kCheckpointKey);
  if (found == inspection.file.metadata.end()) return nullptr;
  constexpr int kDeepest = 3;  // nesting down to a word in a list in the config
  if (!try_parse_json(found->second, {.deepest = kDeepest})) return nullptr;
  return Json::parse(found->second);  // try_parse_json() does not keep the order of fields
}

}  // namespace

std::string to_text(const Inspection& inspection) {
  const Total total = total_of(inspection);
  return about(inspection) + "\n" + list(inspection, total) + "\n" +
         (total.is_measured ? qualities(inspection, total) : kNotMeasured);
}

std::string to_json(const Inspection& inspection) {
  const Safetensors& file = inspection.file;
  const Total total = total_of(inspection);
  Json metadata = file.metadata, tensors = Json::array();
  metadata.erase(kCheckpointKey);
  for (const auto& [entry, not_finite, outside_f32, measured] : inspection.tensors) {
    Json tensor = {{"name", entry.name},
                   {"shape", entry.shape},
                   {"dtype", entry.dtype},
                   {"bytes", entry.bytes.size()}};
    if (!measured.empty()) {
      tensor["not_finite"] = not_finite;
      tensor["outside_f32"] = outside_f32;
      tensor["recipes"] = qualities_json(inspection, measured);
    }
    tensors.push_back(tensor);
  }
  Json sums = {
      {"tensors", inspection.tensors.size()}, {"elements", total.elements}, {"bytes", total.bytes}};
  if (total.is_measured) sums["recipes"] = qualities_json(inspection, total.qualities);
  const Json json = {{"file", inspection.path},
                     {"bytes", file.file.bytes().size()},
                     {"has_checksum", file.has_checksum},
                     {"metadata", metadata},
                     {"checkpoint", checkpoint_json(inspection)},
                     {"tensors", tensors},
                     {"total", sums}};
  // A path may be no UTF-8, and may hold control characters that a terminal would obey; as ASCII,
  // JSON holds neither.
  return json.dump(2, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + "\n";
}

}  // namespace moxie::cli
