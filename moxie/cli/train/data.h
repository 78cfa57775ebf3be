// Corpus: text as windows of tokens. Files are memory-mapped and read as one stream. Stretches of
// it are held out for evaluation; the other windows are for training, in an order shuffled by the
// seed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {

// Finds the text files at the given paths, each once, in an order that depends only on their names.
// In folders it skips hidden files, files with a zero byte near their start, installed packages,
// and the folders of runs.
std::vector<std::string> find_text_files(const std::vector<std::string>& paths);

struct CorpusOptions {
  std::vector<std::string> paths;  // empty: the sources of Python's standard library
  int64_t seq_len = 0;
  double held_out = 0;
  uint64_t seed = 0;
};

// A window has seq_len tokens and the token after them.
class Corpus {
 public:
  explicit Corpus(const CorpusOptions& options);  // throws Error if there is too little text

  int64_t windows() const { return windows_; }            // number of windows to train on
  int64_t held_out_windows() const { return held_out_; }  // number of windows to evaluate on
  int64_t bytes() const { return bytes_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  // A hash of the text and of how it is split: it changes if files are added, removed, renamed,
  // resized or edited, and if the version of the split changes. Of large texts only samples are
  // hashed, so that an edit may be missed.
  const std::string& fingerprint() const { return fingerprint_; }

  // Copies training window number `position`, seq_len + 1 bytes. Positions past windows() start the
  // next epoch, which has an order of its own.
  void read(int64_t position, uint8_t* to) const;
  // Copies one of `count` windows that are spread evenly over the held-out text; the same index
  // always gives the same window.
  void read_held_out(int64_t index, int64_t count, uint8_t* to) const;

  // The entropy of a byte given the byte before it, in nats, over the held-out text. Models learn
  // these frequencies first: one whose loss is not below it has learnt nothing more.
  double bigram_entropy() const;

 private:
  // A file of the stream. With very many files only the first stay mapped, because a process may
  // have about 65,530 mappings; the others are mapped for each read.
  struct Source {
    MappedFile mapped;
    std::string path;  // empty if the file stays mapped
    size_t bytes = 0;
  };
  std::string make_fingerprint(const std::string& names) const;
  // Calls f(bytes) for each file's part of the stream from `place` on.
  template <class F>
  void for_each_piece(int64_t place, int64_t count, F&& f) const;
  void copy_window(int64_t window, uint8_t* to) const;
  int64_t held_out_before(int64_t stretch) const;  // held-out stretches among the first
  std::vector<Source> files_;
  std::vector<int64_t> ends_;  // where each file ends in the stream
  int64_t seq_len_, bytes_ = 0, windows_ = 0, held_out_ = 0;
  // The share of text that is held out, in whole stretches that are evenly spread: this samples all
  // files fairly, whatever their sizes, and few training windows touch held-out ones.
  double share_;
  int64_t stretch_ = 1, stretches_ = 0;  // windows in a stretch; whole stretches of the text
  uint64_t seed_;
  std::string fingerprint_;
};

// Whether an old version made this fingerprint, which covered neither the contents nor the split.
bool is_old_fingerprint(const std::string& fingerprint);

// Shuffles: the place of `index` in a permutation of 0 .. count - 1, which `key` chooses.
int64_t shuffled(int64_t index, int64_t count, uint64_t key);

}  // namespace moxie::cli
