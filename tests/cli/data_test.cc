// Corpus, the text that a run trains on: its windows, their order, and which are held out.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "moxie/cli/file/error.h"
#include "moxie/cli/train/data.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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

// Text in which bytes 2i and 2i + 1 hold i (little-endian), so that a window shows where it begins.
std::string numbered(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += static_cast<char>(i % 2 == 0 ? i / 2 % 256 : i / 512);
  return text;
}

class CorpusTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSeqLen = 8;
  // Writes numbered text to three files, in the order in which find_text_files() lists them.
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
    // Files are named one by one: in a folder, one that starts with a zero byte is skipped as
    // binary, as the first of these does.
    options_ = {.paths = {folder_.path("a"), folder_.path("b"), folder_.path("c")},
                .seq_len = kSeqLen,
                .held_out = 0.1,
                .seed = 3};
  }

  // The position of the window in the text. Fails the test if the window is no part of it.
  static int64_t begin_of(const std::vector<uint8_t>& window) {
    const std::string all = numbered(1000);
    const std::string_view bytes(reinterpret_cast<const char*>(window.data()), window.size());
    const size_t at = all.find(bytes);
    EXPECT_NE(at, all.npos) << "a window is not of the stream";
    return static_cast<int64_t>(at);
  }
  static std::vector<int64_t> held_out_of(const Corpus& corpus) {
    std::vector<int64_t> begins;
    std::vector<uint8_t> window(kSeqLen + 1);
    for (int64_t i = 0; i < corpus.held_out_windows(); ++i) {
      corpus.read_held_out(i, corpus.held_out_windows(), window.data());
      begins.push_back(begin_of(window));
    }
    return begins;
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
    for (const int64_t begin : held_out_of(corpus)) order.push_back(begin);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < 999 / kSeqLen; ++i) ASSERT_EQ(order[i], i * kSeqLen);
  }
  EXPECT_EQ(orders.size(), 3u);
}

TEST_F(CorpusTest, HeldOutWindowsAreTheSameForEverySeedAndNoneComesFromOutside) {
  const Corpus corpus(options_);
  const std::vector<int64_t> begins = held_out_of(corpus);
  options_.seed = 4;
  EXPECT_EQ(held_out_of(Corpus(options_)), begins);
  std::vector<uint8_t> window(kSeqLen + 1);
  for (int64_t i = 0; i < 100; ++i) {  // more than there are held-out windows, so some repeat
    corpus.read_held_out(i, 100, window.data());
    EXPECT_THAT(begins, ::testing::Contains(begin_of(window)));
  }
}

TEST_F(CorpusTest, HeldOutStretchesAreSpreadOverTheWholeText) {
  for (const double share : {0.001, 0.05, 0.1, 0.3, 0.5}) {
    SCOPED_TRACE(share);
    options_.held_out = share;
    const Corpus corpus(options_);
    const std::vector<int64_t> begins = held_out_of(corpus);
    EXPECT_EQ(std::ssize(begins), std::llround(std::ceil(124 * share)));
    for (size_t i = 1; i < begins.size(); ++i)
      EXPECT_NEAR(static_cast<double>(begins[i] - begins[i - 1]), kSeqLen / share, kSeqLen);
  }
}

TEST(Corpus, LongTextIsHeldOutInStretchesOf64Windows) {
  const Folder folder;
  std::string text;  // each window contains its number
  for (int i = 0; i < 100000; ++i) text += std::to_string(1000000 + i) + "\n";
  const Corpus corpus(
      {.paths = {folder.write("x", text)}, .seq_len = 8, .held_out = 0.05, .seed = 1});
  const auto number = [](const std::vector<uint8_t>& window) {
    return std::stoi(std::string(window.begin(), window.begin() + 7)) - 1000000;
  };
  std::vector<uint8_t> window(9);
  std::set<int> seen;
  for (int64_t i = 0; i < corpus.held_out_windows(); ++i) {
    corpus.read_held_out(i, corpus.held_out_windows(), window.data());
    EXPECT_TRUE(number(window) / 64 % 20 == 0) << number(window);
    seen.insert(number(window));
  }
  EXPECT_EQ(std::ssize(seen), corpus.held_out_windows());
  for (int64_t i = 0; i < corpus.windows(); ++i) {
    corpus.read(i, window.data());
    EXPECT_TRUE(seen.insert(number(window)).second) << number(window);
  }
  EXPECT_EQ(seen.size(), 99999u) << "a window needs the byte after it";
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

TEST_F(CorpusTest, TheFingerprintSeesEveryByteOfSmallTextAndItsOrder) {
  const std::string before = Corpus(options_).fingerprint(), a = folder_.read("a");
  for (size_t i = 0; i < a.size(); ++i) {
    std::string changed = a;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    folder_.write("a", changed);
    ASSERT_NE(Corpus(options_).fingerprint(), before) << i;
  }
  folder_.write("a", a);
  EXPECT_EQ(Corpus(options_).fingerprint(), before);
}

TEST_F(CorpusTest, TheFingerprintTellsHowTheTextIsSplit) {
  EXPECT_FALSE(is_old_fingerprint(Corpus(options_).fingerprint()));
  EXPECT_TRUE(is_old_fingerprint("0123456789abcdef")) << "names and sizes alone";
}

TEST(Corpus, TheFingerprintOfMuchTextSeesSamplesOfIt) {
  const Folder folder;
  const std::string path = folder.write("x", "a");
  constexpr int64_t kBytes = int64_t{1} << 30;  // a sparse file: takes no space on the disk
  std::filesystem::resize_file(path, kBytes);
  const auto fingerprint = [&] {
    return Corpus({.paths = {path}, .seq_len = 128, .held_out = 0.05, .seed = 1}).fingerprint();
  };
  const auto put = [&](int64_t at, char c) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at).put(c);
  };
  const std::string before = fingerprint();
  for (const int64_t at : {int64_t{0}, kBytes - 1}) {
    put(at, 'b');
    EXPECT_NE(fingerprint(), before) << at;
    put(at, at == 0 ? 'a' : '\0');
  }
  EXPECT_EQ(fingerprint(), before);
  for (int64_t at = 0; at < kBytes; at += kBytes / 128) put(at + 512, 'b');
  EXPECT_EQ(fingerprint(), before) << "what lies between the samples is not seen";
  std::filesystem::resize_file(path, kBytes + 1);
  EXPECT_NE(fingerprint(), before);
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
  const auto corpus = [&](const std::string& text) {
    return Corpus({.paths = {folder.write("x", text)}, .seq_len = 4, .held_out = 0.5, .seed = 1});
  };
  std::string turns, fair;
  for (int i = 0; i < 500; ++i) turns += "abcd";
  for (int i = 0; i < 500; ++i) fair += "aabb";  // after either letter both are equally frequent
  EXPECT_EQ(corpus(turns).bigram_entropy(), 0);
  EXPECT_NEAR(corpus(fair).bigram_entropy(), std::log(2.0), 1e-5);
  // For random text the expected value is computed here, as the sum over pairs in the definition.
  Random random(1);
  std::string text;
  for (int i = 0; i < 4001; ++i) text += "abcdefgh"[random.below(1 + random.below(8))];
  const Corpus any = corpus(text);
  std::map<std::pair<uint8_t, uint8_t>, double> pairs;
  std::map<uint8_t, double> firsts;
  std::vector<uint8_t> window(5);
  for (int64_t i = 0; i < any.held_out_windows(); ++i) {
    any.read_held_out(i, any.held_out_windows(), window.data());
    for (size_t j = 0; j < 4; ++j) ++pairs[{window[j], window[j + 1]}], ++firsts[window[j]];
  }
  const auto tokens = static_cast<double>(4 * any.held_out_windows());
  double expected = 0;
  for (const auto& [pair, count] : pairs)
    expected -= count / tokens * std::log(count / firsts[pair.first]);
  EXPECT_NEAR(any.bigram_entropy(), expected, 1e-12);
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

TEST(FindTextFiles, TakesEachFileOnce) {
  const Folder folder;
  for (const char* name : {"a", "b", "part/c"}) folder.write(name, "text");
  const std::vector<std::string> once = find_text_files({folder.path()});
  EXPECT_EQ(once.size(), 3u);
  EXPECT_EQ(find_text_files({folder.path(), folder.path("a"), folder.path("part/c")}), once);
  EXPECT_EQ(find_text_files({folder.path(), folder.path("part"), folder.path("part/../a")}), once);
  EXPECT_EQ(find_text_files({folder.path("a"), folder.path("a")}).size(), 1u);
  std::filesystem::create_symlink(folder.path("b"), folder.path("link"));
  const std::vector<std::string> linked = find_text_files({folder.path()});
  EXPECT_EQ(linked.size(), 3u) << ::testing::PrintToString(linked);
}

// Linux lets a process map about 65,530 files at once by default, so a corpus cannot keep all files
// mapped.
TEST(Corpus, ReadsMoreFilesThanAProcessMayMap) {
  const Folder folder;
  constexpr int64_t kFiles = 66'000, kSeqLen = 8;
  for (int64_t i = 0; i < kFiles; ++i) std::ofstream(folder.path(std::to_string(i))) << i + 100'000;
  const Corpus corpus({.paths = {folder.path()}, .seq_len = kSeqLen, .held_out = 0.1, .seed = 1});
  EXPECT_EQ(corpus.files(), kFiles);
  EXPECT_EQ(corpus.bytes(), 6 * kFiles);
  std::string text;  // all files' text, in order of file names
  for (const std::string& path : find_text_files({folder.path()}))
    text += std::to_string(std::stoll(std::filesystem::path(path).filename().string()) + 100'000);
  std::vector<uint8_t> window(kSeqLen + 1);
  for (int64_t i = 0; i < corpus.windows(); i += 997) {
    corpus.read(i, window.data());
    const std::string_view bytes(reinterpret_cast<const char*>(window.data()), window.size());
    ASSERT_NE(text.find(bytes), text.npos) << "window " << i;
  }
  const std::vector<std::string> paths = find_text_files({folder.path()});
  for (size_t i = paths.size() - 100; i < paths.size(); ++i)
    std::ofstream(paths[i], std::ios::app) << "more";
  EXPECT_THROW(for (int64_t i = 0; i < corpus.windows(); ++i) corpus.read(i, window.data()),
               IoError)
      << "files that are not mapped are looked at each time";
}

}  // namespace
}  // namespace moxie::testing
