// Text as windows of tokens: files are memory-mapped and read as one stream; stretches of it are
// held out for evaluation; the windows of the rest come in an order that the seed gives.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {

// Files of the paths given, each once, in an order that their names alone decide. In a folder only
// text is taken: nothing hidden, no file with a zero byte near its start, no installed packages.
std::vector<std::string> find_text_files(const std::vector<std::string>& paths);

struct CorpusOptions {
  std::vector<std::string> paths;  // empty: python_library() of process/python.h
  int64_t seq_len = 0;
  double held_out = 0;
  uint64_t seed = 0;
};

// A window is seq_len tokens and the one after them.
class Corpus {
 public:
  explicit Corpus(const CorpusOptions& options);  // Error where there is not enough text

  int64_t windows() const { return windows_; }            // to train on
  int64_t held_out_windows() const { return held_out_; }  // to evaluate on
  int64_t bytes() const { return bytes_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  // Changes when files are added, removed or renamed, when their sizes or contents change, and with
  // the way in which text is split here. Of much text the contents are sampled.
  const std::string& fingerprint() const { return fingerprint_; }

  // The window that comes `position` windows after the start of training, epoch after epoch; each
  // epoch is in an order of its own. Copies seq_len + 1 bytes.
  void read(int64_t position, uint8_t* to) const;
  // Evenly spread over what is held out, the same ones each time.
  void read_held_out(int64_t index, int64_t count, uint8_t* to) const;

  // Entropy of a byte given the byte before it, in nats, of the held-out text: what a model learns
  // first, and must beat to have learnt anything more.
  double bigram_entropy() const;

 private:
  // A file of the stream. A process may have some 65,530 mappings, so of very many files the first
  // are mapped for good, the others for each reading.
  struct Source {
    MappedFile mapped;
    std::string path;  // empty where it is mapped
    size_t bytes = 0;
  };
  std::string make_fingerprint(const std::string& names) const;
  // f(bytes) for the pieces of the stream from `place`, one of each file.
  template <class F>
  void for_each_piece(int64_t place, int64_t count, F&& f) const;
  void copy_window(int64_t window, uint8_t* to) const;
  int64_t held_out_before(int64_t stretch) const;  // stretches
  std::vector<Source> files_;
  std::vector<int64_t> ends_;  // of each file in the stream
  int64_t seq_len_, bytes_ = 0, windows_ = 0, held_out_ = 0;
  // Held out are whole stretches, evenly spread, so that evaluation is on a fair sample of the text
  // whatever the sizes of its files, and few windows have a neighbour on the other side.
  double share_;
  int64_t stretch_ = 1, stretches_ = 0;  // windows of one; how many there are
  uint64_t seed_;
  std::string fingerprint_;
};

// Whether a fingerprint is of a version that saw neither the contents nor how they are split.
bool is_old_fingerprint(const std::string& fingerprint);

// The place of `index` in a permutation of 0 .. count - 1 that `key` chooses.
int64_t shuffled(int64_t index, int64_t count, uint64_t key);

}  // namespace moxie::cli
