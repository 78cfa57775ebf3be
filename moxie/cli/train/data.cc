#include "moxie/cli/train/data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "moxie/cli/file/error.h"
#include "moxie/cli/file/old_checksum.h"
#include "moxie/cli/process/python.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

namespace fs = std::filesystem;

// Version of the way in which text is split into training and held-out text, part of every
// fingerprint. It must change whenever a window moves from one side to the other, so that no
// resumed run trains on text that it held out before.
constexpr std::string_view kSplit = "split2-";

// Up to kReadWhole bytes of text are read completely for the fingerprint, which takes about 20 ms.
// Of more text only kPieces pieces are read, because each may be a seek on a disk.
constexpr int64_t kReadWhole = 64 << 20;
constexpr int64_t kPieces = 256, kPieceBytes = 256;

// How many files stay mapped: half of the mappings that Linux allows a process (65,530), because
// libraries need some too.
constexpr size_t kMostMapped = 32768;

// Mixes the bits of x: multiplications carry low bits up, shifts bring high bits down.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

// Binary search for the smallest value below `count` for which `reached` is true; once true, it
// must stay true for larger values.
template <class Reached>
int64_t first_where(int64_t count, Reached&& reached) {
  int64_t begin = 0, end = count - 1;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (reached(middle))
      end = middle;
    else
      begin = middle + 1;
  }
  return begin;
}

bool is_text(const fs::path& path) {
  constexpr size_t kLook = 4096;
  const MappedFile file(path.string());
  return !file.bytes().empty() && file.bytes().substr(0, kLook).find('\0') == std::string::npos;
}

// Whether to skip a folder of the data. Folders of runs and comparisons (recognized by their lock)
// are skipped, as otherwise each run would read the output of the one before.
bool is_skipped_folder(const fs::path& folder) {
  const std::string name = folder.filename().string();
  std::error_code error;
  return name.starts_with('.') || name == "site-packages" || name == "dist-packages" ||
         name == "__pycache__" ||
         (fs::exists(folder / "lock", error) &&
          (fs::exists(folder / "config.json", error) || fs::exists(folder / "plan.json", error)));
}

// A text file. `name` is its path relative to the path that the user gave; `order` is a hash of it,
// so that the order of files does not depend on where the data is.
struct Found {
  uint64_t order;
  std::string name, path;
  auto operator<=>(const Found&) const = default;
};

Found found(const std::string& name, const fs::path& path) {
  OldChecksum sum;
  sum.add(name);
  return {mix(std::stoull(sum.hex(), nullptr, 16)), name, path.string()};
}

void find_in_folder(const fs::path& folder, std::vector<Found>& files) {
  std::error_code error;  // ignored: a dangling link is no file, and is skipped
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied);
  for (; at != fs::recursive_directory_iterator(); ++at) {
    const std::string name = at->path().filename().string();
    if (at->is_directory(error)) {
      if (is_skipped_folder(at->path())) at.disable_recursion_pending();
    } else if (at->is_regular_file(error) && !name.starts_with('.')) {
      try {
        if (is_text(at->path()))
          files.push_back(found(at->path().lexically_relative(folder).string(), at->path()));
      } catch (const IoError&) {
        continue;  // unreadable files of a folder are skipped
      }
    }
  }
}

}  // namespace

std::vector<std::string> find_text_files(const std::vector<std::string>& paths) {
  std::vector<Found> files;
  std::set<fs::path> seen;
  for (const std::string& path : paths) {
    std::vector<Found> here;
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    MOXIE_CHECK(fs::exists(status), "--data: there is no '", path, "'");
    try {
      if (fs::is_directory(status))
        find_in_folder(path, here);
      else
        here.push_back(found(fs::path(path).filename().string(), path));
    } catch (const fs::filesystem_error& problem) {
      throw IoError("--data: cannot read '" + path + "': " + problem.code().message());
    }
    std::sort(here.begin(), here.end());  // keeps always the same of a file and its links
    for (const Found& file : here)
      if (seen.insert(fs::weakly_canonical(file.path, error)).second) files.push_back(file);
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> sorted;
  for (const Found& file : files) sorted.push_back(file.path);
  return sorted;
}

Corpus::Corpus(const CorpusOptions& options)
    : seq_len_(options.seq_len), share_(options.held_out), seed_(options.seed) {
  const std::vector<std::string> paths =
      options.paths.empty() ? std::vector{python_library()} : options.paths;
  std::string names;
  for (const std::string& path : find_text_files(paths)) {
    MappedFile file(path);
    if (file.bytes().empty()) continue;
    const size_t size = file.bytes().size();
    bytes_ += static_cast<int64_t>(size);
    names += fs::path(path).filename().string() + "\n" + std::to_string(bytes_) + "\n";
    if (files_.size() < kMostMapped)
      files_.push_back({.mapped = std::move(file), .path = {}, .bytes = size});
    else
      files_.push_back({.mapped = {}, .path = path, .bytes = size});
    ends_.push_back(bytes_);
  }
  fingerprint_ = make_fingerprint(names);
  const int64_t all = std::max<int64_t>(bytes_ - 1, 0) / seq_len_;
  // How many windows a held-out stretch has: 64 if there is enough text (8 KB in the tiny preset);
  // if there is little, many short stretches are a better sample.
  constexpr int64_t kLongest = 64, kEnough = 64;
  const double wanted = static_cast<double>(all) * share_;
  stretch_ = std::clamp<int64_t>(std::llround(wanted) / kEnough, 1, kLongest);
  stretches_ = all / stretch_;
  held_out_ = held_out_before(stretches_) * stretch_;
  windows_ = all - held_out_;
  MOXIE_CHECK(windows_ > 0 && held_out_ > 0, "--data: ", bytes_, " bytes of text in ", files(),
              " files are too few for windows of ", seq_len_,
              " tokens, one to train on and one to hold out");
}

int64_t Corpus::held_out_before(int64_t stretch) const {
  return std::llround(std::ceil(static_cast<double>(stretch) * share_));
}

std::string Corpus::make_fingerprint(const std::string& names) const {
  OldChecksum sum;
  sum.add(names);
  const auto add = [&](std::string_view bytes) {
    sum.add(bytes);
    return true;
  };
  if (bytes_ <= kReadWhole)
    for_each_piece(0, bytes_, add);
  else
    for (int64_t i = 0; i < kPieces; ++i)  // evenly spaced, from the first bytes to the last
      for_each_piece(i * (bytes_ - kPieceBytes) / (kPieces - 1), kPieceBytes, [&](auto bytes) {
        add(bytes);
        return false;  // a piece ends with its file, as old fingerprints expect
      });
  return std::string(kSplit) + sum.hex();
}

// Passes the stream's bytes from `place` on to f, file by file, until `count` are read or f returns
// false.
template <class F>
void Corpus::for_each_piece(int64_t place, int64_t count, F&& f) const {
  auto at =
      static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), place) - ends_.begin());
  for (bool goes_on = true; goes_on && count > 0; ++at) {
    const Source& source = files_[at];
    MappedFile now;
    if (!source.path.empty()) now = MappedFile(source.path);
    const std::string_view bytes = source.path.empty() ? source.mapped.bytes() : now.bytes();
    if (bytes.size() != source.bytes)
      throw IoError("'" + source.path + "' has changed its size while the run reads it");
    const int64_t left = ends_[at] - place, some = std::min(left, count);
    goes_on = f(bytes.substr(bytes.size() - static_cast<size_t>(left), static_cast<size_t>(some)));
    place += some;
    count -= some;
  }
}

void Corpus::copy_window(int64_t window, uint8_t* to) const {
  for_each_piece(window * seq_len_, seq_len_ + 1, [&](std::string_view bytes) {
    std::memcpy(to, bytes.data(), bytes.size());
    to += bytes.size();
    return true;
  });
}

void Corpus::read(int64_t position, uint8_t* to) const {
  const auto epoch = static_cast<uint64_t>(position / windows_);
  const int64_t index = shuffled(position % windows_, windows_, mix(seed_ + 1) + epoch);
  const int64_t stretch = index / stretch_;  // counted among the stretches that are not held out
  if (stretch >= stretches_ - held_out_before(stretches_))
    return copy_window(index + held_out_, to);  // a window after the last whole stretch
  const int64_t at =
      first_where(stretches_, [&](int64_t i) { return i + 1 - held_out_before(i + 1) > stretch; });
  copy_window(at * stretch_ + index % stretch_, to);
}

void Corpus::read_held_out(int64_t index, int64_t count, uint8_t* to) const {
  const int64_t window = index * held_out_ / count;
  const int64_t at = first_where(
      stretches_, [&](int64_t i) { return held_out_before(i + 1) > window / stretch_; });
  copy_window(at * stretch_ + window % stretch_, to);
}

double Corpus::bigram_entropy() const {
  std::vector<int64_t> pairs(256 * 256), firsts(256);
  std::vector<uint8_t> window(static_cast<size_t>(seq_len_) + 1);
  for (int64_t index = 0; index < held_out_; ++index) {
    read_held_out(index, held_out_, window.data());
    for (size_t i = 0; i + 1 < window.size(); ++i) {
      ++pairs[window[i] * size_t{256} + window[i + 1]];
      ++firsts[window[i]];
    }
  }
  double sum = 0;
  for (size_t pair = 0; pair < pairs.size(); ++pair)
    if (pairs[pair] > 0) {
      const auto count = static_cast<double>(pairs[pair]);
      sum -= count * std::log(count / static_cast<double>(firsts[pair / 256]));
    }
  return sum / static_cast<double>(held_out_ * seq_len_);
}

bool is_old_fingerprint(const std::string& fingerprint) {
  return !fingerprint.starts_with("split");
}

// A Feistel network permutes the numbers of the fewest even bits that hold `count`. A result
// outside of the range is permuted again, until it is inside. This needs no table, and costs the
// same for any index.
int64_t shuffled(int64_t index, int64_t count, uint64_t key) {
  constexpr int kRounds = 4;
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(count - 1)));
  const int half = std::max(1, (bits + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (mix(right + mix(key + round)) & mask);
      left = right;
      right = next;
    }
    value = (left << half) | right;
  } while (value >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(value);
}

}  // namespace moxie::cli
