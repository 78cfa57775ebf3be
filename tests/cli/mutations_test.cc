// Reads damaged and hostile files: each must give an error with the path, without a crash or hang.
// Builds with sanitizers also find reads past the end of a file.
#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "moxie/cli/file/error.h"
#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/train/config.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using Json = nlohmann::ordered_json;
using Mutation = std::function<std::string(Random&, const std::string&)>;

constexpr int kFiles = 1000;

// The message of the Error or IoError that read() throws; empty if it succeeds. Any other exception
// fails the test.
std::string error_of(const std::function<void()>& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  } catch (const IoError& error) {
    return error.what();
  }
  return "";
}

size_t place(Random& random, const std::string& bytes) {
  return static_cast<size_t>(random.below(std::ssize(bytes)));
}

// ---- of bytes ----------------------------------------------------------------------------------

std::string flip_bits(Random& random, const std::string& from) {
  std::string bytes = from;
  for (int64_t count = random.pick<int64_t>({1, 1, 2, 8}); count > 0; --count)
    bytes[place(random, from)] ^= static_cast<char>(1 << random.below(8));
  return bytes;
}

std::string truncate(Random& random, const std::string& from) {
  return from.substr(0, place(random, from));
}

std::string splice(Random& random, const std::string& from) {
  const size_t to = place(random, from), at = place(random, from), count = place(random, from);
  return std::string(from).replace(to, random.chance(50) ? count : 0, from.substr(at, count));
}

std::string erase(Random& random, const std::string& from) {
  return std::string(from).erase(place(random, from), 1 + place(random, from) / 4);
}

std::string append(Random& random, const std::string& from) {
  return from + std::string(1 + place(random, from), random.chance(50) ? '\0' : '}');
}

std::string zero_run(Random& random, const std::string& from) {
  const size_t at = place(random, from), count = std::min<size_t>(64, from.size() - at);
  return std::string(from).replace(at, count, std::string(count, '\0'));
}

std::string change_length(Random& random, const std::string& from) {
  uint64_t length;
  std::memcpy(&length, from.data(), sizeof length);
  const auto near = static_cast<uint64_t>(random.between(1, 16));
  length = random.pick<uint64_t>({length + near, length - near, length * 256, length << 40,
                                  UINT64_MAX - near, from.size(), from.size() - 8 + near, 0});
  return length_bytes(length) + from.substr(8);
}

// ---- of the header -----------------------------------------------------------------------------

std::string header_of(const std::string& file) {
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  return file.substr(8, length);
}

std::string with_header(const std::string& file, const std::string& header) {
  return raw_safetensors(header, file.substr(8 + header_of(file).size()));
}

Json& random_entry(Random& random, Json& header) {
  for (;;) {
    const auto at = std::next(header.begin(), random.below(std::ssize(header)));
    if (at.key() != "__metadata__") return at.value();
  }
}

const std::vector<Json>& odd_values() {
  static const std::vector<Json> values = {nullptr,
                                           true,
                                           -1,
                                           1.5,
                                           1e300,
                                           18446744073709551615u,
                                           "",
                                           "F32\x7f",
                                           Json::array(),
                                           Json::object(),
                                           {-1, 1},
                                           {0, 1, 2},
                                           {{1}},
                                           {1e18, 1},
                                           {1u << 31, 1u << 31, 1u << 31}};
  return values;
}

// Returns the file with an unexpected value in place of a tensor's field, a whole tensor's entry or
// the metadata.
std::string odd_field(Random& random, const std::string& file) {
  Json header = Json::parse(header_of(file));
  Json& entry = random_entry(random, header);
  const Json& value = odd_values()[static_cast<size_t>(random.below(std::ssize(odd_values())))];
  switch (random.below(5)) {
    case 0: entry["dtype"] = value; break;
    case 1: entry["data_offsets"] = value; break;
    case 2: header["__metadata__"] = 7; break;
    case 3: entry = value; break;
    default: entry["shape"] = value.is_array() && value.empty() ? Json(-7) : value;
  }
  return with_header(file, header.dump());
}

std::string unknown_field(Random& random, const std::string& file) {
  Json header = Json::parse(header_of(file));
  Json& entry = random_entry(random, header);
  if (random.chance(50))
    entry["strides"] = {1, 2};
  else
    entry.erase(random.pick<const char*>({"dtype", "shape", "data_offsets"}));
  return with_header(file, header.dump());
}

std::string shift_offsets(Random& random, const std::string& file) {
  Json header = Json::parse(header_of(file));
  Json& offsets = random_entry(random, header)["data_offsets"];
  const auto by = static_cast<uint64_t>(random.between(1, 9));
  switch (random.below(4)) {
    case 0: std::swap(offsets[0], offsets[1]); break;
    case 1: offsets[1] = offsets[1].get<uint64_t>() + by; break;
    case 2: offsets[0] = offsets[0].get<uint64_t>() - by; break;
    default: offsets = {offsets[0].get<uint64_t>() + by, offsets[1].get<uint64_t>() + by};
  }
  return with_header(file, header.dump());
}

std::string duplicate_key(Random& random, const std::string& file) {
  const Json header = Json::parse(header_of(file));
  const auto at = std::next(header.begin(), random.below(std::ssize(header)));
  std::string text = header.dump();
  text.insert(1, Json(at.key()).dump() + ":" + at.value().dump() + ",");
  return with_header(file, text);
}

std::string nest(Random& random, const std::string& file) {
  const auto depth = static_cast<size_t>(random.pick<int64_t>({5, 1000, 1000000}));
  const std::string open = random.chance(50) ? "[" : "{\"a\":";
  std::string text;
  for (size_t i = 0; i < depth; ++i) text += open;
  return with_header(file, random.chance(50) ? text : "{\"x\":" + text);
}

const std::vector<Mutation> kHeaderMutations = {
    truncate, append, odd_field, unknown_field, shift_offsets, duplicate_key, nest};
const std::vector<Mutation> kMutations = {flip_bits,     truncate,      splice,        erase,
                                          append,        zero_run,      change_length, odd_field,
                                          unknown_field, shift_offsets, duplicate_key, nest};

// The bytes of a checkpoint with a few tensors, as train/checkpoint.cc writes one.
std::string checkpoint(const Folder& folder) {
  const Json about = {{"config", to_json(Config())},
                      {"position", {{"step", 7}, {"window", 112}, {"seconds", 1.5}}}};
  const std::string weight(512, 'w'), mean(512, '\1'), rng(100, 'r');
  const auto tensor = [](const char* name, const char* dtype, std::vector<int64_t> shape,
                         const std::string& bytes) {
    return TensorToWrite{name, dtype, std::move(shape),
                         [view = std::string_view(bytes)] { return view; }};
  };
  write_safetensors(
      folder.path("checkpoint"), {{"moxie.checkpoint", about.dump()}},
      {tensor("model.a", "F32", {4, 32}, weight), tensor("model.b", "F32", {128}, mean),
       tensor("adam.mean.a", "F32", {4, 32}, mean), tensor("rng.cpu", "U8", {100}, rng)});
  return folder.read("checkpoint");
}

std::string of_others() {
  return raw_safetensors(R"({"__metadata__":{"format":"pt"},)"
                         R"("a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                         R"("b":{"dtype":"F32","shape":[5],"data_offsets":[12,32]},)"
                         R"("c":{"dtype":"I64","shape":[1],"data_offsets":[32,40]}})",
                         std::string(40, 'd'));
}

TEST(Mutations, EveryDamagedCheckpointIsRefused) {
  const Folder folder;
  const std::string whole = checkpoint(folder);
  ASSERT_EQ(error_of([&] { read_safetensors(folder.path("checkpoint")); }), "");
  Random random(1);
  for (int i = 0; i < kFiles;) {
    const size_t kind = static_cast<size_t>(random.below(std::ssize(kMutations)));
    const std::string bytes = kMutations[kind](random, whole);
    if (bytes == whole) continue;
    const std::string path = folder.write("x", bytes);
    const std::string error = error_of([&] { read_safetensors(path); });
    ASSERT_THAT(error, ::testing::HasSubstr(path)) << "file " << i << ", mutation " << kind;
    ++i;
  }
}

// Files of other programs have no checksum. Changed values cannot be found in them, but a file that
// breaks a rule of the format must be refused.
TEST(Mutations, FilesOfOthersThatBreakARuleAreRefused) {
  const Folder folder;
  const std::string whole = of_others();
  Random random(2);
  for (int i = 0; i < kFiles; ++i) {
    const size_t kind = static_cast<size_t>(random.below(std::ssize(kHeaderMutations)));
    const std::string path = folder.write("x", kHeaderMutations[kind](random, whole));
    const std::string error = error_of([&] { read_safetensors(path); });
    ASSERT_THAT(error, ::testing::HasSubstr(path)) << "file " << i << ", mutation " << kind;
  }
}

TEST(Mutations, TensorsOfDamagedForeignFilesStayInsideTheFile) {
  const Folder folder;
  const std::string whole = of_others();
  Random random(3);
  for (int i = 0; i < kFiles; ++i) {
    std::string bytes = random.chance(50) ? flip_bits(random, whole) : splice(random, whole);
    const std::string path = folder.write("x", bytes);
    const std::string error = error_of([&] {
      const Safetensors file = read_safetensors(path);
      size_t total = 8 + header_of(bytes).size();
      for (const TensorEntry& entry : file.tensors) total += std::string(entry.bytes).size();
      EXPECT_EQ(total, bytes.size());
    });
    if (!error.empty()) {
      ASSERT_THAT(error, ::testing::HasSubstr(path));
    }
  }
}

// ---- configs -----------------------------------------------------------------------------------

Json wrong_value(Random& random, const Field& field) {
  const std::vector<Json> any = {nullptr, Json::object(), Json::array({1}), Json::array({nullptr}),
                                 Json::array({Json::array({1})})};
  const Json odd = any[static_cast<size_t>(random.below(std::ssize(any)))];
  if (random.chance(30)) return odd;
  return std::visit(
      [&](const auto member) -> Json {
        using T = std::remove_cvref_t<decltype(Config().*member)>;
        if constexpr (std::is_same_v<T, int64_t>)
          return random.pick<Json>({"7", 1.5, -1, true, 1e18, INT64_MIN, UINT64_MAX});
        else if constexpr (std::is_same_v<T, double>)
          return random.pick<Json>({"7", -1, 1e300, true, INT64_MIN});
        else if constexpr (std::is_same_v<T, bool>)
          return random.pick<Json>({0, "true", 1.0});
        else if constexpr (std::is_same_v<T, std::string>)
          return random.pick<Json>({0, false, Json::array({"a"}), std::string("a\0b", 3)});
        else
          return random.pick<Json>({0, "a", Json::array({"a", 1}), Json::object()});
      },
      field.member);
}

std::string mutated_config(Random& random) {
  Json json = to_json(random.chance(50) ? Config() : preset("dsv3"));
  const Field& field = fields()[static_cast<size_t>(random.below(std::ssize(fields())))];
  const std::string name(field.name), text = json.dump(1);
  switch (random.below(9)) {
    case 0: return text.substr(0, place(random, text));
    case 1: return text + random.pick<const char*>({"}", ",", "0", "{}", "\x01"});
    case 2: json[name] = wrong_value(random, field); break;
    case 3: json[name + random.pick<const char*>({"s", "_", "\n", " "})] = 1; break;
    case 4: json["preset"] = random.pick<Json>({"tiyn", 7, nullptr, Json::array()}); break;
    case 5: return std::string(text).insert(1, "\"" + name + "\":" + json[name].dump() + ",");
    case 6:
      return std::string(text).insert(
          1, "\"" + name + "\":" +
                 random.pick<const char*>({"1e999", "-1e999", "NaN", "0x10", "'a'", "\"\xff\"",
                                           "[\"\xc3\"]", "\"\x01\"", "[", "{{"}) +
                 ",");
    case 7: return std::string(static_cast<size_t>(random.pick<int64_t>({3, 100000})), '[') + text;
    default: return random.pick<Json>({7, "text", nullptr, Json::array({json}), true}).dump();
  }
  return json.dump(1);
}

TEST(Mutations, EveryBrokenConfigIsRefused) {
  const Folder folder;
  Random random(4);
  for (int i = 0; i < kFiles; ++i) {
    const std::string text = mutated_config(random), path = folder.write("config.json", text);
    const std::string error = error_of([&] { read_config(path, Config()); });
    ASSERT_THAT(error, ::testing::HasSubstr(path))
        << "config " << i << ": " << text.substr(0, 2000);
  }
}

TEST(Mutations, WhatADamagedConfigLeavesIsInRange) {
  const Folder folder;
  const std::string whole = to_json(Config()).dump(1);
  Random random(5);
  for (int i = 0; i < kFiles; ++i) {
    const std::string path = folder.write("config.json", flip_bits(random, whole));
    const std::string error = error_of([&] {
      const Config config = read_config(path, Config());
      for (const Field& field : fields())
        if (const auto* member = std::get_if<int64_t Config::*>(&field.member)) {
          EXPECT_LE(static_cast<double>(config.**member), field.most);
        }
      EXPECT_NO_THROW(to_json(config).dump());
    });
    if (!error.empty()) {
      ASSERT_THAT(error, ::testing::HasSubstr(path));
    }
  }
}

}  // namespace
}  // namespace moxie::testing
