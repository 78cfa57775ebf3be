// Text as windows of tokens: files are memory-mapped and read as one stream; stretches of it are
// held out for evaluation; the seed shuffles the other windows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {

// Finds the files of the given paths, each once, in an order that depends only on their names. In
// folders, skips hidden files, files with a zero byte near their start, and installed packages.
std::vector<std::string> find_text_files(const std::vector<std::string>& paths);

struct CorpusOptions {
  std::vector<std::string> paths;  // empty: python_library() of process/python.h
  int64_t seq_len = 0;
  double held_out = 0;
  uint64_t seed = 0;
};

// A window is seq_len tokens and the token after them.
class Corpus {
 public:
  explicit Corpus(const CorpusOptions& options);  // throws Error if there is too little text

  int64_t windows() const { return windows_; }            // to train on
  int64_t held_out_windows() const { return held_out_; }  // to evaluate on
  int64_t bytes() const { return bytes_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  // Changes if files are added, removed, renamed, resized or edited, and if the splitting of text
  // changes. Large texts are sampled.
  const std::string& fingerprint() const { return fingerprint_; }

  // Copies window number `position` of training, seq_len + 1 bytes. Each epoch has its own order.
  void read(int64_t position, uint8_t* to) const;
  // Copies window `index` of `count` windows that are spread evenly over the held-out text, always
  // the same ones.
  void read_held_out(int64_t index, int64_t count, uint8_t* to) const;

  // Entropy of a byte given the byte before it, in nats, of the held-out text. A model learns this
  // first; one that is not below it has learnt nothing more.
  double bigram_entropy() const;

 private:
  // A file of the stream. A process may have about 65,530 mappings, so with very many files only
  // the first stay mapped; the others are mapped for each read.
  struct Source {
    MappedFile mapped;
    std::string path;  // empty if it stays mapped
    size_t bytes = 0;
  };
  std::string make_fingerprint(const std::string& names) const;
  // Calls f(bytes) for the pieces of the stream from `place` on, one piece per file.
  template <class F>
  void for_each_piece(int64_t place, int64_t count, F&& f) const;
  void copy_window(int64_t window, uint8_t* to) const;
  int64_t held_out_before(int64_t stretch) const;  // stretches
  std::vector<Source> files_;
  std::vector<int64_t> ends_;  // of each file in the stream
  int64_t seq_len_, bytes_ = 0, windows_ = 0, held_out_ = 0;
  // Whole stretches, evenly spread, are held out: evaluation then uses a fair sample of the text
  // for any file sizes, and few training windows are next to held-out ones.
  double share_;
  int64_t stretch_ = 1, stretches_ = 0;  // windows per stretch; number of stretches
  uint64_t seed_;
  std::string fingerprint_;
};

// Whether a fingerprint is of an old version, which covered neither contents nor splitting.
bool is_old_fingerprint(const std::string& fingerprint);

// The place of `index` in a permutation of 0 .. count - 1 that `key` chooses.
int64_t shuffled(int64_t index, int64_t count, uint64_t key);

}  // namespace moxie::cli
