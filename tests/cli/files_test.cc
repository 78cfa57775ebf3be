// Files that the program reads and writes: safetensors, checksums, atomic replacement.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/checksum.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/file/json.h"
#include "moxie/cli/file/old_checksum.h"
#include "moxie/cli/file/safetensors.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::ThrowsMessage;

TensorToWrite tensor(const std::string& name, const std::string& dtype,
                     const std::vector<int64_t>& shape, std::string_view bytes) {
  return {name, dtype, shape, [bytes] { return bytes; }};
}

std::string random_text(Random& random, int64_t count) {
  const auto bytes = random_bytes<char>(random, count);
  return {bytes.begin(), bytes.end()};
}

// ---- safetensors -------------------------------------------------------------------------------

TEST(Safetensors, ComesBackAsItWasWritten) {
  const Folder folder;
  Random random(1);
  const std::string a = random_text(random, 24), b = random_text(random, 5);
  write_safetensors(folder.path("x"), {{"note", "caf\xc3\xa9 \"quoted\"\n"}},
                    {tensor("a", "F32", {2, 3}, a), tensor("none", "BF16", {0, 7}, ""),
                     tensor("b \"1\"", "F8_E4M3", {5}, b), tensor("one", "U8", {}, "x")});
  const Safetensors file = read_safetensors(folder.path("x"));
  EXPECT_TRUE(file.has_checksum);
  EXPECT_THAT(file.metadata,
              ElementsAre(Pair("moxie.format", "2"), Pair("note", "caf\xc3\xa9 \"quoted\"\n")));
  ASSERT_EQ(file.tensors.size(), 4u);
  EXPECT_EQ(file.find("a")->bytes, a);
  EXPECT_THAT(file.find("a")->shape, ElementsAre(2, 3));
  EXPECT_EQ(file.find("b \"1\"")->bytes, b);
  EXPECT_EQ(file.find("b \"1\"")->dtype, "F8_E4M3");
  EXPECT_EQ(file.find("none")->bytes, "");
  EXPECT_THAT(file.find("none")->shape, ElementsAre(0, 7));
  EXPECT_THAT(file.find("one")->shape, IsEmpty());
  EXPECT_EQ(file.find("c"), nullptr);
  const auto address = reinterpret_cast<uintptr_t>(file.find("a")->bytes.data());
  EXPECT_EQ(address % 8, 0u) << "the first tensor is aligned for any dtype";
}

TEST(Safetensors, ReadsFilesOfOthers) {
  const Folder folder;
  EXPECT_THAT(read_safetensors(folder.write("empty", raw_safetensors("{}", ""))).tensors,
              IsEmpty());
  // The header lists entries out of order, unaligned, with metadata and padding, and two empty
  // tensors at the same offset.
  const Safetensors file = read_safetensors(folder.write(
      "x", raw_safetensors(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[3,7]},)"
                           R"("a":{"shape":[3],"dtype":"U8","data_offsets":[0,3]},)"
                           R"("n1":{"dtype":"I64","shape":[0],"data_offsets":[7,7]},)"
                           R"("n2":{"dtype":"F16","shape":[4,0],"data_offsets":[7,7]},)"
                           R"("__metadata__":{"format":"pt"}}    )",
                           "abcdefg")));
  EXPECT_FALSE(file.has_checksum);
  EXPECT_EQ(file.find("a")->bytes, "abc");
  EXPECT_EQ(file.find("b")->bytes, "defg");
  EXPECT_EQ(file.tensors[0].name, "a");
  EXPECT_THAT(file.metadata, ElementsAre(Pair("format", "pt")));
}

struct Broken {
  const char* header;
  const char* data;
  const char* message;
};

TEST(Json, TimeGrowsWithTheTextAndNotWithItsSquare) {
  std::string text = "{";  // quadratic parsing would take minutes
  for (int i = 0; i < 200000; ++i) text += '"' + std::to_string(i) + R"(":{"a":[]},)";
  text.back() = '}';
  EXPECT_EQ(parse_json("x", text, {.deepest = 2, .most_bytes = text.size()}).size(), 200000u);
}

TEST(Json, IsRefusedWhereItWouldTakeTooMuchMemory) {
  const auto refuses = [](const std::string& text, const JsonLimits& limits, const char* message) {
    EXPECT_THAT([&] { parse_json("x", text, limits); },
                ThrowsMessage<Error>(AllOf(HasSubstr("'x'"), HasSubstr(message))));
    EXPECT_FALSE(try_parse_json(text, limits));
  };
  refuses(std::string(200000, '['), {.deepest = 4}, "nested too deeply");
  refuses("[1,2,3]", {.most_values = 3}, "more than 3 values");
  refuses("[1,2,3]", {.most_bytes = 6}, "7 bytes are too many");
  EXPECT_EQ(parse_json("x", "[1,2,3]", {.most_bytes = 7, .most_values = 4}).size(), 3u);
}

// A limit on values is needed: parsing a header of 100 MiB of "[],[],.." took 4.6 GB.
TEST(Safetensors, AHeaderFullOfValuesTakesLittleMemory) {
  const Folder folder;
  std::string header = R"({"a":[)";
  header.reserve(size_t{64} << 20);
  while (header.size() < size_t{64} << 20) header += "[],";
  header += "[]]}";
  const std::string path = folder.write("x", raw_safetensors(header, ""));
  EXPECT_THAT([&] { read_safetensors(path); },
              ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr("more than 1000000 values"))));
}

TEST(Safetensors, RefusesMoreDimsThanATensorHas) {
  const Folder folder;
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  const std::string path = folder.write(
      "x", raw_safetensors(R"({"a":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1]}})",
                           "x"));
  EXPECT_THAT([&] { read_safetensors(path); },
              ThrowsMessage<Error>(HasSubstr("at most 64 dims, got 65")));
}

TEST(Safetensors, TellsItsChecksumBeforeTheFileHasItsName) {
  const Folder folder;
  std::string told;
  write_safetensors(folder.path("x"), {}, {tensor("a", "U8", {2}, "ab")},
                    [&](const std::string& checksum) {
                      told = checksum;
                      EXPECT_FALSE(std::filesystem::exists(folder.path("x")));
                    });
  EXPECT_EQ(read_safetensors(folder.path("x")).checksum, told);
  std::string bytes = folder.read("x");
  bytes.back() ^= 1;
  folder.write("x", bytes);
  EXPECT_EQ(read_safetensors(folder.path("x"), Verify::kHeader).checksum, told);
  EXPECT_THROW(read_safetensors(folder.path("x")), Error);
}

TEST(Safetensors, NamesTheRuleThatAFileBreaks) {
  constexpr const char *kAb = "ab", *kOut = "are not inside the 2 bytes";
  const Broken cases[] = {
      {"", kAb, "this is no JSON"},
      {"{", kAb, "this is no JSON"},
      {"{} x", "", "this is no JSON"},
      {"{\"a\xff\":1}", "", "this is no JSON"},
      {"[]", "", "the header must be an object"},
      {"7", "", "the header must be an object"},
      {R"({"a":[[[[1]]]]})", kAb, "nested too deeply"},
      {R"({"a":1,"a":1})", kAb, R"(has twice the key "a")"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}})", kAb,
       R"(has twice the key "dtype")"},
      {R"({"__metadata__":7})", "", "__metadata__ must be an object"},
      {R"({"__metadata__":{"x":7}})", "", R"(metadata must be text, "x" is number)"},
      {R"({"a":7})", kAb, R"(tensor "a" must have dtype, shape and data_offsets)"},
      {R"({"a":{"dtype":"U8","shape":[2]}})", kAb, "must have dtype, shape and data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":1}})", kAb, "nothing else"},
      {R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,2]}})", kAb, R"(no dtype "F33")"},
      {R"({"a":{"dtype":8,"shape":[2],"data_offsets":[0,2]}})", kAb, "no dtype 8"},
      {R"({"a":{"dtype":"U8","shape":2,"data_offsets":[0,2]}})", kAb, "has no shape"},
      {R"({"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}})", kAb, "integers >= 0, got -2"},
      {R"({"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}})", kAb, "integers >= 0, got 2.0"},
      {R"({"a":{"dtype":"U8","shape":[[]],"data_offsets":[0,2]}})", kAb, "integers >= 0, got []"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,2]}})", kAb,
       "integers >= 0, got 9223372036854775808"},
      {R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,2]}})", kAb,
       "integers >= 0, got 1e+20"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,2]}})", kAb,
       "the shape is too large"},
      {R"({"a":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,2]}})", kAb,
       "is not 2 bytes"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0]}})", kAb, "must be two integers"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":{"0":0}}})", kAb, "must be two integers"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[-1,1]}})", kAb, "must be two integers"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,"2"]}})", kAb, "must be two integers"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}})", kAb, kOut},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", kAb, kOut},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[18446744073709551614,0]}})", kAb, kOut},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}})", kAb,
       "U8 of shape [1] is not 2 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", kAb,
       R"(the bytes of tensor "a" do not follow)"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       kAb, R"(the bytes of tensor "b" do not follow)"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", kAb,
       "1 bytes at the end belong to no tensor"},
      {"{}", kAb, "2 bytes at the end belong to no tensor"},
      {R"({"__metadata__":{"moxie.format":"1"}})", "", "its checksum is missing"},
      {R"({"__metadata__":{"moxie.checksum":"12"}})", "", "its checksum is missing"},
      {R"({"__metadata__":{"moxie.checksum":"0123456789abcdef"}})", "",
       "is damaged: its checksum is"},
      {R"({"__metadata__":{"moxie.checksum":"0123456789abcdef","moxie.format":"3"}})", "",
       "is damaged, or of a later version: its format is '3', and 1 and 2 are known"},
  };
  const Folder folder;
  for (const Broken& broken : cases) {
    const std::string path = folder.write("x", raw_safetensors(broken.header, broken.data));
    EXPECT_THAT([&] { read_safetensors(path); },
                ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr(broken.message))))
        << broken.header;
  }
}

// The test contains the bytes of such a file, because no code writes format 1 any more.
TEST(Safetensors, ReadsFilesOfFormatOne) {
  const Folder folder;
  std::string header =
      R"({"__metadata__":{"moxie.checksum":"6c094f18e605bd3d","moxie.format":"1","note":"old"},)"
      R"("a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const Safetensors file = read_safetensors(folder.write("x", raw_safetensors(header, "xyz")));
  EXPECT_TRUE(file.has_checksum);
  EXPECT_EQ(file.find("a")->bytes, "xyz");
  const std::string damaged = folder.write("y", raw_safetensors(header, "xyy"));
  EXPECT_THAT([&] { read_safetensors(damaged); },
              ThrowsMessage<Error>(HasSubstr("is damaged: its checksum is")));
}

TEST(Safetensors, RefusesFilesOfOtherFormats) {
  const Folder folder;
  const auto expect = [&](const std::string& bytes, const std::string& message) {
    const std::string path = folder.write("x", bytes);
    EXPECT_THAT([&] { read_safetensors(path); },
                ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr(message))));
  };
  expect("", "is no safetensors file: it has 0 bytes");
  expect("1234567", "it has 7 bytes");
  expect(length_bytes(3) + "{}", "its header would be 3 bytes, the file is 10");
  expect(length_bytes(UINT64_MAX) + "{}", "its header would be 18446744073709551615 bytes");
  expect("#!/bin/sh\nexit 1\n", "is no safetensors file, or cut short");
  for (const std::string& path : {folder.path("absent"), folder.path(), std::string("/dev/null")})
    EXPECT_THAT([&] { read_safetensors(path); }, ThrowsMessage<IoError>(HasSubstr(path)));
  ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(read_safetensors(folder.path("pipe")), IoError) << "nothing is waited for";
}

TEST(Safetensors, MessagesStayShortAndOnOneLine) {
  const Folder folder;
  const std::string name(100000, 'n'), escape = R"(\u001b[2J\n)";
  for (const std::string& text : {name, escape}) {
    const std::string path = folder.write("x", raw_safetensors("{\"" + text + "\":7}", ""));
    try {
      read_safetensors(path);
      FAIL() << "an error was due";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_LT(message.size(), 600u);
      EXPECT_TRUE(std::all_of(message.begin(), message.end(), [](char c) { return c >= ' '; }));
    }
  }
  EXPECT_EQ(printable("a\x1b[1m\xc3\xa9\n", 5), "a?[1m..");
}

TEST(Safetensors, LeavesTheOldFileWhereATensorCannotBeHad) {
  const Folder folder;
  folder.write("x", "old");
  EXPECT_THROW(write_safetensors(folder.path("x"), {},
                                 {tensor("a", "U8", {2}, "ab"),
                                  {"b", "U8", {1}, []() -> std::string_view { fail("lost"); }}}),
               Error);
  EXPECT_THAT([&] { write_safetensors(folder.path("x"), {}, {tensor("a", "U8", {3}, "ab")}); },
              ThrowsMessage<Error>(HasSubstr("tensors have 2 bytes, their shapes 3")));
  EXPECT_EQ(folder.read("x"), "old");
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

// ---- checksum ----------------------------------------------------------------------------------

template <class Sum>
std::string checksum_of(std::string_view bytes) {
  Sum sum;
  sum.add(bytes);
  return sum.hex();
}

template <class Sum>
class EveryChecksum : public ::testing::Test {};
using Checksums = ::testing::Types<Checksum, OldChecksum>;
TYPED_TEST_SUITE(EveryChecksum, Checksums);

TEST(Checksum, IsXxh3WithSeedZero) {
  EXPECT_EQ(checksum_of<Checksum>(""), "2d06800538d394c2");
  EXPECT_EQ(checksum_of<Checksum>("abc"), "78af5f94892f3950");
}

TYPED_TEST(EveryChecksum, DoesNotDependOnHowBytesAreCut) {
  Random random(2);
  const std::string bytes = random_text(random, 1000);
  const std::string whole = checksum_of<TypeParam>(bytes);
  EXPECT_EQ(whole.size(), 16u);
  for (int round = 0; round < 200; ++round) {
    TypeParam sum;
    for (size_t at = 0; at < bytes.size();) {
      const auto some = static_cast<size_t>(random.below(random.pick<int64_t>({2, 40, 300})));
      sum.add(std::string_view(bytes).substr(at, some));
      at += some;
    }
    ASSERT_EQ(sum.hex(), whole) << "round " << round;
  }
}

TYPED_TEST(EveryChecksum, ChangesWithEveryBitAndWithZerosAtTheEnd) {
  std::string bytes(70, '\0');
  std::vector<std::string> seen;
  for (size_t count = 0; count <= bytes.size(); ++count)
    seen.push_back(checksum_of<TypeParam>(std::string_view(bytes).substr(0, count)));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(1 << bit % 8);
    seen.push_back(checksum_of<TypeParam>(bytes));
    bytes[bit / 8] = '\0';
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

// ---- atomic files ------------------------------------------------------------------------------

TEST(AtomicFile, TakesItsNameAtCommitAndNotBefore) {
  const Folder folder;
  folder.write("x", "old");
  {
    AtomicFile file(folder.path("x"));
    file.write("nxw");
    file.overwrite(1, "e");
    EXPECT_EQ(folder.read("x"), "old");
    file.commit();
    EXPECT_EQ(folder.read("x"), "new");
  }
  { AtomicFile(folder.path("x")).write("never committed"); }
  EXPECT_EQ(folder.read("x"), "new");
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

// While one exists, this process can write no file larger than `bytes`: simulates a full disk.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, handler_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit old_ = {};
  void (*handler_)(int);
};

TEST(AtomicFile, KeepsTheOldFileIfTheDiskIsFull) {
  const Folder folder;
  folder.write("x", "old");
  const std::string much(1 << 20, 'm');
  std::string message;
  {
    const FileLimit limit(100000);
    try {
      write_safetensors(folder.path("x"), {}, {tensor("a", "U8", {1 << 20}, much)});
    } catch (const IoError& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, AllOf(HasSubstr("cannot write"), HasSubstr(folder.path("x"))));
  EXPECT_EQ(folder.read("x"), "old");
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

TEST(AtomicFile, SaysWhatCannotBeWritten) {
  const Folder folder;
  const std::string nowhere = folder.path("no/such/folder/x");
  EXPECT_THAT([&] { write_file(nowhere, "x"); }, ThrowsMessage<IoError>(HasSubstr(nowhere)));
  std::filesystem::create_directory(folder.path("taken"));
  EXPECT_THAT([&] { write_file(folder.path("taken"), "x"); },
              ThrowsMessage<IoError>(HasSubstr(folder.path("taken"))));
  EXPECT_THAT(folder.names(), ElementsAre("taken"));
}

TEST(AtomicFile, WhetherAPathCanBeWrittenIsKnownBeforeAndLeavesNothing) {
  const Folder folder;
  folder.write("old", "text");
  folder.write("old.unfinished", "of another process");
  EXPECT_NO_THROW(check_can_write(folder.path("new")));
  EXPECT_NO_THROW(check_can_write(folder.path("old")));
  EXPECT_THAT(folder.names(), ElementsAre("old", "old.unfinished"));
  EXPECT_EQ(folder.read("old") + folder.read("old.unfinished"), "textof another process");
  EXPECT_THAT([&] { check_can_write(folder.path("no/x")); },
              ThrowsMessage<IoError>(HasSubstr("cannot write '" + folder.path("no/x") + "'")));
  EXPECT_THAT([&] { check_can_write(folder.path()); },
              ThrowsMessage<IoError>(HasSubstr("Is a directory")));
  EXPECT_THROW(check_can_write(folder.path(std::string(250, 'x'))), IoError);
}

TEST(AtomicFile, WhatAKilledProcessLeftIsCleanedUp) {
  const Folder folder;
  const auto is_x = [](std::string_view name) { return name == "x"; };
  for (const char* name : {"x.unfinished", "x.a1b2c3.unfinished", "w.unfinished",
                           "x.a1b2.unfinished", "x.a1b2C3.unfinished", ".unfinished"})
    folder.write(name, "half");
  folder.write("x", "whole");
  remove_unfinished_files(folder.path(), is_x);
  EXPECT_THAT(folder.names(), ElementsAre(".unfinished", "w.unfinished", "x", "x.a1b2.unfinished",
                                          "x.a1b2C3.unfinished"));
  EXPECT_NO_THROW(remove_unfinished_files(folder.path("absent"), is_x));
}

TEST(AtomicFile, WritesToNoFileAndThroughNoLinkOfTheUsers) {
  const Folder folder;
  folder.write("mine", "precious");
  folder.write("w.unfinished", "the user's");
  std::filesystem::create_symlink(folder.path("mine"), folder.path("v.unfinished"));
  std::filesystem::create_symlink(folder.path("mine"), folder.path("link"));
  for (const char* name : {"w", "v", "link"}) write_file(folder.path(name), "new");
  EXPECT_EQ(folder.read("mine"), "precious");
  EXPECT_EQ(folder.read("w.unfinished"), "the user's");
  EXPECT_FALSE(std::filesystem::is_symlink(folder.path("link")));
  EXPECT_THAT(folder.names(),
              ElementsAre("link", "mine", "v", "v.unfinished", "w", "w.unfinished"));
}

}  // namespace
}  // namespace moxie::testing
