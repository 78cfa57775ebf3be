// What needs no torch: the config, the text and the metrics of a run, words for people, GPUs.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "moxie/cli/file/error.h"
#include "moxie/cli/info/gpus.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/config.h"
#include "moxie/cli/train/data.h"
#include "moxie/cli/train/metrics.h"
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
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

// ---- text --------------------------------------------------------------------------------------

TEST(Text, DidYouMeanTakesTheNearestWordAndNoFarOne) {
  const std::vector<std::string_view> known = {"steps", "seed", "seq_len", "batch"};
  EXPECT_EQ(did_you_mean("stesp", known), "; did you mean 'steps'?");
  EXPECT_EQ(did_you_mean("seq-len", known), "; did you mean 'seq_len'?");
  EXPECT_EQ(did_you_mean("learning_rate", known), "");
  EXPECT_EQ(did_you_mean("", {}), "");
  EXPECT_EQ(did_you_mean(std::string(100000, 's'), known), "");
}

TEST(Text, NumbersAreShort) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(1e20), "90949470.2 TiB");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(12345), "12.3k");
  EXPECT_EQ(human_time(59.6), "1m 00s");
  EXPECT_EQ(human_time(3725), "1h 02m");
  EXPECT_EQ(human_time(-1), "0s");
}

TEST(Text, ATableAlignsItsColumns) {
  Table table({"name", "size"});
  table.add({"a", "10"});
  table.add({"longer", "7"});
  table.add({"only"});
  EXPECT_EQ(table.text(), "name    size\na         10\nlonger     7\nonly\n");
}

TEST(Gpus, KernelsRunOnTheirArchitectureAndOnWhatCanFollowIt) {
  EXPECT_TRUE(runs_on("90a-real", 90));
  EXPECT_TRUE(runs_on("90a-real 100a-real", 100));
  EXPECT_FALSE(runs_on("90a-real", 100));
  EXPECT_FALSE(runs_on("90a", 100)) << "an 'a' architecture is for one GPU alone";
  EXPECT_TRUE(runs_on("80-real", 86));
  EXPECT_FALSE(runs_on("80-real", 90));
  EXPECT_TRUE(runs_on("80", 90)) << "the driver compiles what is not for one machine";
  EXPECT_FALSE(runs_on("90-virtual", 80));
  EXPECT_FALSE(runs_on("", 90));
}

// ---- config ------------------------------------------------------------------------------------

TEST(Config, ComesBackFromJsonAsItWas) {
  const Folder folder;
  for (const Preset& known : presets()) {
    Config config = known.config;
    config.data = {"a b", "caf\xc3\xa9/\"x\""};
    config.lr = 0.1 + 0.2;
    config.recipe = {"experts=mxfp8_rceil", "re:.*wq=bf16"};
    config.tied_head = true;
    const std::string path = folder.write("config.json", to_json(config).dump(2));
    EXPECT_EQ(read_config(path, Config()), config) << known.name;
    EXPECT_NO_THROW(check(config));
  }
}

TEST(Config, FieldsOverTheBaseAndThePreset) {
  const Folder folder;
  EXPECT_EQ(read_config(folder.write("a", R"({"steps": 7})"), preset("small")).dim, 512);
  const Config config =
      read_config(folder.write("b", R"({"steps": 7, "preset": "llama4"})"), preset("small"));
  EXPECT_EQ(config.dim, 5120);
  EXPECT_EQ(config.steps, 7) << "a field wins over the preset, wherever it stands";
  EXPECT_EQ(config.preset, "llama4");
}

TEST(Config, ErrorsNameTheFileTheFieldAndTheValue) {
  const Folder folder;
  const auto expect = [&](const std::string& text, const std::string& message) {
    const std::string path = folder.write("x", text);
    EXPECT_THAT([&] { read_config(path, Config()); },
                ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr(message))));
  };
  expect(R"({"step": 7})", R"(there is no field "step"; did you mean 'steps'?)");
  expect(R"({"steps": "7"})", R"("steps" must be an integer, got "7")");
  expect(R"({"steps": 0})", "--steps must be 1 to 1e+09, got 0");
  expect(R"({"score": "relu"})", "--score must be one of softmax, sigmoid, got 'relu'");
  expect(R"({"recipe": "bf16"})", R"("recipe" must be a list of texts, got "bf16")");
  expect(R"({"out": "a\u0000b"})", "--out must be UTF-8 without zero bytes");
  expect(R"({"preset": "tiyn"})", "did you mean 'tiny'?");
  expect(R"({"lr": 1, "lr": 2})", R"(has twice the key "lr")");
  expect("[1]", "must be an object of fields, got array");
  expect("steps: 7", "this is no JSON");
  EXPECT_THROW(read_config(folder.path("absent"), Config()), IoError);
}

TEST(Config, FlagsAreParsedWholeOrRefused) {
  const auto set = [](std::string_view name, const Words& words) {
    Config config;
    for (const Field& field : fields())
      if (field.name == name) set_from_words(config, field, words);
    return config;
  };
  EXPECT_EQ(set("steps", {"12"}).steps, 12);
  EXPECT_EQ(set("lr", {"1e-3"}).lr, 1e-3);
  EXPECT_EQ(set("tied_head", {"true"}).tied_head, true);
  EXPECT_THAT(set("data", {"a", "b"}).data, ElementsAre("a", "b"));
  for (const char* word : {"", "12x", "1.5", "0x10", "99999999999999999999", " 1"})
    EXPECT_THROW(set("steps", {word}), Error) << word;
  for (const char* word : {"nan", "inf", "-1", "1e400", "1,5"})
    EXPECT_THROW(set("lr", {word}), Error) << word;
  EXPECT_THROW(set("tied_head", {"yes"}), Error);
  EXPECT_THROW(set("steps", {"1", "2"}), Error);
  EXPECT_THAT([&] { set("out", {"\xff"}); },
              ThrowsMessage<Error>(HasSubstr("--out must be UTF-8")));
}

TEST(Config, ChecksFieldsAgainstEachOther) {
  Config config;
  config.kv_heads = 3;
  EXPECT_THAT([&] { check(config); }, ThrowsMessage<Error>(HasSubstr("--kv-heads, got 4 and 3")));
  config = {.experts = 2, .top_k = 3};
  EXPECT_THAT([&] { check(config); }, ThrowsMessage<Error>(HasSubstr("--experts, got 3 and 2")));
  config = {.recipe = {}};
  EXPECT_THROW(check(config), Error);
}

// ---- metrics -----------------------------------------------------------------------------------

TEST(Metrics, GoOnWithoutTornLinesAndLaterSteps) {
  const Folder folder;
  const std::string kept = "{\"event\":\"step\",\"step\":1}\n{\"event\":\"eval\",\"step\":2}\n";
  folder.write("m", kept + "{\"step\":3}\n\n7\n{\"step\":\"1\"}\n{\"step\":2.5}\n{}\n{\"ste\n" +
                        "{\"event\":\"step\",\"step\":2");
  {
    Metrics metrics(folder.path("m"), 2);
    EXPECT_EQ(folder.read("m"), kept);
    metrics.write({{"step", 3}, {"loss", std::nan("")}});
    EXPECT_EQ(folder.read("m"), kept + "{\"step\":3,\"loss\":null}\n");
  }
  { Metrics metrics(folder.path("m"), 0); }
  EXPECT_EQ(folder.read("m"), "");
  EXPECT_THAT(folder.names(), ElementsAre("m"));
  EXPECT_THROW(Metrics(folder.path("no/m"), 0), IoError);
}

// ---- data --------------------------------------------------------------------------------------

TEST(Shuffled, IsAPermutationThatTheKeyChooses) {
  for (const int64_t count : {1, 2, 3, 4, 5, 16, 17, 100, 1000}) {
    std::set<std::vector<int64_t>> orders;
    for (uint64_t key = 0; key < 8; ++key) {
      std::vector<int64_t> order;
      for (int64_t i = 0; i < count; ++i) order.push_back(shuffled(i, count, key));
      orders.insert(order);
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(order[i], i) << count << " " << key;
    }
    if (count >= 16) {
      EXPECT_EQ(orders.size(), 8u) << count;
    }
  }
  const int64_t many = int64_t{1} << 60;
  EXPECT_LT(shuffled(many - 1, many, 7), many);
}

// Bytes that say where they are: the little-endian place / 2, so that windows can be told apart.
std::string numbered(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += static_cast<char>(i % 2 == 0 ? i / 2 % 256 : i / 512);
  return text;
}

class CorpusTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSeqLen = 8;
  // Three files as one stream, in the order that find_text_files() gives.
  CorpusTest() {
    const std::string text = numbered(1000);
    const char* names[] = {"a", "b", "c"};
    for (const char* name : names) folder_.write(name, "x");
    size_t at = 0;
    for (const std::string& path : find_text_files({folder_.path()})) {
      const size_t some = at == 0 ? 333 : at == 333 ? 4 : text.size() - at;
      folder_.write(std::filesystem::path(path).filename().string(), text.substr(at, some));
      at += some;
    }
    // One of them starts with a zero byte, so it is named: a folder would leave it out.
    options_ = {.paths = {folder_.path("a"), folder_.path("b"), folder_.path("c")},
                .seq_len = kSeqLen,
                .held_out = 0.1,
                .seed = 3};
  }

  // The place of a window's first byte, after a check that its bytes follow each other.
  static int64_t begin_of(const std::vector<uint8_t>& window) {
    const std::string all = numbered(1000);
    const std::string_view bytes(reinterpret_cast<const char*>(window.data()), window.size());
    const size_t at = all.find(bytes);
    EXPECT_NE(at, all.npos) << "a window is not of the stream";
    return static_cast<int64_t>(at);
  }
  static std::vector<uint8_t> train_window(const Corpus& corpus, int64_t position) {
    std::vector<uint8_t> window(kSeqLen + 1);
    corpus.read(position, window.data());
    return window;
  }

  Folder folder_;
  CorpusOptions options_;
};

TEST_F(CorpusTest, EveryEpochReadsEveryWindowOnceInItsOwnOrder) {
  const Corpus corpus(options_);
  EXPECT_EQ(corpus.bytes(), 1000);
  EXPECT_EQ(corpus.files(), 3);
  EXPECT_EQ(corpus.windows() + corpus.held_out_windows(), 999 / kSeqLen);
  EXPECT_EQ(corpus.held_out_windows(), 13) << "a tenth of 124, rounded up";
  std::set<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < corpus.windows(); ++i)
      order.push_back(begin_of(train_window(corpus, epoch * corpus.windows() + i)));
    orders.insert(order);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < corpus.windows(); ++i) ASSERT_EQ(order[i], i * kSeqLen);
  }
  EXPECT_EQ(orders.size(), 3u);
}

TEST_F(CorpusTest, HeldOutWindowsAreNoInputOfTraining) {
  const Corpus corpus(options_);
  std::vector<int64_t> begins;
  std::vector<uint8_t> window(kSeqLen + 1);
  for (int64_t i = 0; i < corpus.held_out_windows(); ++i) {
    corpus.read_held_out(i, corpus.held_out_windows(), window.data());
    begins.push_back(begin_of(window));
    EXPECT_GE(begins.back(), corpus.windows() * kSeqLen);
    if (i > 0) {
      EXPECT_EQ(begins[i], begins[i - 1] + kSeqLen);
    }
  }
  for (int64_t i = 0; i < 100; ++i) {  // more than there are: some come again, none from outside
    corpus.read_held_out(i, 100, window.data());
    EXPECT_THAT(begins, ::testing::Contains(begin_of(window)));
  }
}

TEST_F(CorpusTest, TheSeedGivesTheOrder) {
  const Corpus a(options_), same(options_);
  options_.seed = 4;
  const Corpus other(options_);
  int differ = 0;
  for (int64_t i = 0; i < a.windows(); ++i) {
    EXPECT_EQ(train_window(a, i), train_window(same, i));
    differ += train_window(a, i) != train_window(other, i);
  }
  EXPECT_GT(differ, 90);
  EXPECT_EQ(a.fingerprint(), other.fingerprint());
}

TEST_F(CorpusTest, TheFingerprintSeesNamesAndSizes) {
  const std::string before = Corpus(options_).fingerprint();
  folder_.write("a", folder_.read("a") + "x");
  const std::string longer = Corpus(options_).fingerprint();
  EXPECT_NE(longer, before);
  std::filesystem::rename(folder_.path("a"), folder_.path("d"));
  options_.paths[0] = folder_.path("d");
  EXPECT_NE(Corpus(options_).fingerprint(), longer);
}

TEST_F(CorpusTest, TooLittleTextIsAnError) {
  options_.seq_len = 999;
  EXPECT_THAT(
      [&] { Corpus corpus(options_); },
      ThrowsMessage<Error>(HasSubstr("1000 bytes of text in 3 files are too few for windows "
                                     "of 999 tokens")));
  options_.paths = {folder_.write("empty", "")};
  EXPECT_THROW(Corpus corpus(options_), Error);
}

TEST(Corpus, BigramEntropyOfKnownText) {
  const Folder folder;
  const auto entropy = [&](const std::string& text) {
    return Corpus({.paths = {folder.write("x", text)}, .seq_len = 4, .held_out = 0.5, .seed = 1})
        .bigram_entropy();
  };
  std::string turns, fair;
  for (int i = 0; i < 500; ++i) turns += "abcd";
  for (int i = 0; i < 500; ++i) fair += "aabb";  // after an a comes a or b, as often; after b too
  EXPECT_EQ(entropy(turns), 0);
  EXPECT_NEAR(entropy(fair), std::log(2.0), 1e-5);
  // Of any text: the sum over pairs, from its own definition.
  Random random(1);
  std::string text;
  for (int i = 0; i < 4001; ++i) text += "abcdefgh"[random.below(1 + random.below(8))];
  std::map<std::string, double> pairs;
  std::map<char, double> firsts;
  for (size_t i = 2000; i < 4000; ++i) ++pairs[text.substr(i, 2)], ++firsts[text[i]];
  double expected = 0;
  for (const auto& [pair, count] : pairs)
    expected -= count / 2000 * std::log(count / firsts[pair[0]]);
  EXPECT_NEAR(entropy(text), expected, 1e-12);
}

TEST(FindTextFiles, TakesTextFromFoldersInAnOrderThatNamesDecide) {
  const Folder a, b;
  for (const Folder* folder : {&a, &b}) {
    for (int i = 0; i < 20; ++i) folder->write("part/" + std::to_string(i) + ".txt", "text");
    for (const char* name : {".hidden", ".git/x", "site-packages/x", "part/__pycache__/x"})
      folder->write(name, "text");
    folder->write("binary", std::string("ab\0c", 4));
    folder->write("empty", "");
    std::filesystem::create_symlink("loop", folder->path("loop"));
    std::filesystem::create_symlink("nowhere", folder->path("dangling"));
  }
  const auto relative = [](const Folder& folder) {
    std::vector<std::string> names;
    for (const std::string& path : find_text_files({folder.path()}))
      names.push_back(path.substr(folder.path().size()));
    return names;
  };
  const std::vector<std::string> names = relative(a);
  EXPECT_EQ(names.size(), 20u) << ::testing::PrintToString(names);
  EXPECT_EQ(relative(b), names) << "where the folder lies does not matter";
  EXPECT_FALSE(std::is_sorted(names.begin(), names.end()));
  EXPECT_THAT(find_text_files({a.path("binary")}), ElementsAre(a.path("binary")))
      << "what is named is taken";
  EXPECT_THAT([&] { find_text_files({a.path("absent")}); },
              ThrowsMessage<Error>(HasSubstr(a.path("absent"))));
}

TEST(FindTextFiles, SaysWhichPythonIsMissing) {
  const char* old = std::getenv("MOXIE_PYTHON");
  const std::string kept = old != nullptr ? old : "";
  ::setenv("MOXIE_PYTHON", "/nowhere/python3", 1);
  EXPECT_THAT([] { python_library(); }, ThrowsMessage<Error>(HasSubstr("/nowhere/python3")));
  if (old != nullptr)
    ::setenv("MOXIE_PYTHON", kept.c_str(), 1);
  else
    ::unsetenv("MOXIE_PYTHON");
}

}  // namespace
}  // namespace moxie::testing
