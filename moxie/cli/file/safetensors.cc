#include "moxie/cli/file/safetensors.h"

#include <algorithm>
#include <cstring>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/checksum.h"
#include "moxie/cli/file/json.h"
#include "moxie/cli/file/old_checksum.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMostHeaderBytes = 100 << 20;  // the format's own limit, which all readers have
constexpr int kDeepest = 3;                       // nesting: header, entry, shape
constexpr size_t kMostDims = 64;                  // torch's limit
constexpr std::string_view kChecksum = "moxie.checksum";
constexpr std::string_view kFormat = "moxie.format";
constexpr std::string_view kOldFormat = "1";  // has the checksum of old_checksum.h
constexpr std::string_view kNewFormat = "2";  // has XXH3; otherwise the same
constexpr std::string_view kNoChecksum = "0000000000000000";

struct Dtype {
  std::string_view word;
  int64_t bytes;
};
constexpr Dtype kDtypes[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                             {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},     {"BF16", 2},
                             {"I32", 4},     {"U32", 4}, {"F32", 4}, {"F64", 8},     {"I64", 8},
                             {"U64", 8},     {"C64", 8}};

int64_t checked_count(const std::string& where, const Json& shape) {
  MOXIE_CHECK(shape.is_array(), where, " has no shape");
  MOXIE_CHECK(shape.size() <= kMostDims, where, " must have at most ", kMostDims, " dims, got ",
              shape.size());
  int64_t count = 1;
  for (const Json& size : shape) {
    MOXIE_CHECK(size.is_number_unsigned() && size.get<uint64_t>() <= INT64_MAX, where,
                ": sizes must be integers >= 0, got ", printable(size.dump()));
    MOXIE_CHECK(!__builtin_mul_overflow(count, size.get<int64_t>(), &count), where,
                ": the shape is too large");
  }
  return count;
}

TensorEntry read_entry(const std::string& path, const std::string& name, const Json& json,
                       std::string_view data) {
  const std::string where = "'" + path + "': tensor " + printable(Json(name).dump());
  MOXIE_CHECK(json.is_object() && json.size() == 3 && json.contains("dtype") &&
                  json.contains("shape") && json.contains("data_offsets"),
              where, " must have dtype, shape and data_offsets, and nothing else");
  TensorEntry entry{.name = name};
  MOXIE_CHECK(json["dtype"].is_string() && bytes_per_element(json["dtype"].get<std::string>()) > 0,
              where, ": Moxie reads no dtype ", printable(json["dtype"].dump()));
  entry.dtype = json["dtype"];
  int64_t bytes = checked_count(where, json["shape"]);
  entry.shape = json["shape"].get<std::vector<int64_t>>();
  const Json& offsets = json["data_offsets"];
  MOXIE_CHECK(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                  offsets[1].is_number_unsigned(),
              where, ": data_offsets must be two integers >= 0, got ", printable(offsets.dump()));
  const uint64_t begin = offsets[0], end = offsets[1];
  MOXIE_CHECK(begin <= end && end <= data.size(), where, ": data_offsets ",
              printable(offsets.dump()), " are not inside the ", data.size(),
              " bytes of the file's data");
  MOXIE_CHECK(!__builtin_mul_overflow(bytes, bytes_per_element(entry.dtype), &bytes) &&
                  static_cast<uint64_t>(bytes) == end - begin,
              where, ": ", entry.dtype, " of shape ", printable(json["shape"].dump()), " is not ",
              end - begin, " bytes");
  entry.bytes = data.substr(begin, end - begin);
  return entry;
}

Metadata read_metadata(const std::string& path, const Json& header) {
  Metadata metadata;
  if (!header.contains("__metadata__")) return metadata;
  const Json& json = header["__metadata__"];
  MOXIE_CHECK(json.is_object(), "'", path, "': __metadata__ must be an object");
  for (const auto& [key, value] : json.items()) {
    MOXIE_CHECK(value.is_string(), "'", path, "': metadata must be text, ",
                printable(Json(key).dump()), " is ", value.type_name());
    metadata[key] = value;
  }
  return metadata;
}

// Checksum of a whole file, computed as if the 16 digits of the checksum, which start at `digits`,
// were zeros.
template <class Sum>
std::string checksum_of(std::string_view file, size_t digits) {
  Sum sum;
  sum.add(file.substr(0, digits));
  sum.add(kNoChecksum);
  sum.add(file.substr(digits + kNoChecksum.size()));
  return sum.hex();
}

// Checks the checksum of a file that Moxie wrote; other files have none. Moxie's files hold their
// format and their checksum under two keys, so that if one key is damaged the other still shows
// that a checksum belongs there.
void check_checksum(const std::string& path, std::string_view file, std::string_view header,
                    Verify verify, Safetensors& read) {
  const auto found = read.metadata.find(std::string(kChecksum));
  const bool ours = std::any_of(read.metadata.begin(), read.metadata.end(),
                                [](const auto& item) { return item.first.starts_with("moxie"); });
  if (!ours) return;
  MOXIE_CHECK(found != read.metadata.end() && found->second.size() == kNoChecksum.size(), "'", path,
              "' is damaged: its checksum is missing");
  const std::string quoted = '"' + found->second + '"';
  const size_t at = header.find(quoted);
  MOXIE_CHECK(at != header.npos, "'", path, "' is damaged: its checksum is missing");
  const auto format = read.metadata.find(std::string(kFormat));
  const bool is_old = format != read.metadata.end() && format->second == kOldFormat;
  MOXIE_CHECK(is_old || format == read.metadata.end() || format->second == kNewFormat, "'", path,
              "' is damaged, or of a later version: its format is '", printable(format->second),
              "', and 1 and 2 are known");
  if (verify == Verify::kAll) {
    const size_t digits = kLengthBytes + at + 1;
    const std::string sum =
        is_old ? checksum_of<OldChecksum>(file, digits) : checksum_of<Checksum>(file, digits);
    MOXIE_CHECK(sum == found->second, "'", path, "' is damaged: its checksum is ", sum,
                ", it says ", printable(found->second));
  }
  read.checksum = found->second;
  read.metadata.erase(found);
  read.has_checksum = true;
}

}  // namespace

int64_t bytes_per_element(std::string_view dtype) {
  for (const Dtype& known : kDtypes)
    if (known.word == dtype) return known.bytes;
  return 0;
}

const TensorEntry* Safetensors::find(std::string_view name) const {
  for (const TensorEntry& entry : tensors)
    if (entry.name == name) return &entry;
  return nullptr;
}

Safetensors read_safetensors(const std::string& path, Verify verify) {
  Safetensors read{.file = MappedFile(path)};
  const std::string_view file = read.file.bytes();
  MOXIE_CHECK(file.size() >= kLengthBytes, "'", path, "' is no safetensors file: it has ",
              file.size(), " bytes");
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  MOXIE_CHECK(length <= kMostHeaderBytes && length <= file.size() - kLengthBytes, "'", path,
              "' is no safetensors file, or cut short: its header would be ", length,
              " bytes, the file is ", file.size());
  const std::string_view text = file.substr(kLengthBytes, length);
  const std::string_view data = file.substr(kLengthBytes + length);
  const Json header = parse_json(path, text, {.deepest = kDeepest, .most_bytes = kMostHeaderBytes});
  MOXIE_CHECK(header.is_object(), "'", path, "': the header must be an object");
  read.metadata = read_metadata(path, header);
  for (const auto& [name, json] : header.items())
    if (name != "__metadata__") read.tensors.push_back(read_entry(path, name, json, data));
  std::stable_sort(read.tensors.begin(), read.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  const char* end = data.data();
  for (const TensorEntry& entry : read.tensors) {
    MOXIE_CHECK(entry.bytes.data() == end, "'", path, "': the bytes of tensor ",
                printable(Json(entry.name).dump()), " do not follow those before it");
    end += entry.bytes.size();
  }
  MOXIE_CHECK(end == data.data() + data.size(), "'", path, "': ", data.data() + data.size() - end,
              " bytes at the end belong to no tensor");
  check_checksum(path, file, text, verify, read);
  return read;
}

void write_safetensors(const std::string& path, const Metadata& metadata,
                       const std::vector<TensorToWrite>& tensors,
                       const BeforeCommit& before_commit) {
  // Metadata comes first in the header, for readers that want only the metadata.
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  header["__metadata__"][std::string(kFormat)] = kNewFormat;
  header["__metadata__"][std::string(kChecksum)] = kNoChecksum;
  uint64_t end = 0;
  for (const TensorToWrite& tensor : tensors) {
    uint64_t bytes = static_cast<uint64_t>(bytes_per_element(tensor.dtype));
    for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // 8-byte elements after it are aligned
  const uint64_t length = text.size();
  const std::string_view length_bytes(reinterpret_cast<const char*>(&length), sizeof length);

  AtomicFile file(path);
  Checksum sum;
  const auto write = [&](std::string_view bytes) {
    file.write(bytes);
    sum.add(bytes);
  };
  write(length_bytes);
  write(text);
  uint64_t written = 0;
  for (const TensorToWrite& tensor : tensors) {
    const std::string_view bytes = tensor.bytes();
    write(bytes);
    written += bytes.size();
  }
  MOXIE_CHECK(written == end, "'", path, "': tensors have ", written, " bytes, their shapes ", end);
  const std::string field = '"' + std::string(kChecksum) + "\":\"";
  const std::string checksum = sum.hex();
  file.overwrite(kLengthBytes + text.find(field) + field.size(), checksum);
  if (before_commit) before_commit(checksum);
  file.commit();
}

}  // namespace moxie::cli
