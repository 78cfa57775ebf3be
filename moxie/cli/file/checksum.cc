#include "moxie/cli/file/checksum.h"

#define XXH_INLINE_ALL  // compiles xxHash in, so that no shared library is needed
#include <xxhash.h>

namespace moxie::cli {

std::string hex_digits(uint64_t value) {
  std::string text(16, '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit, value >>= 4)
    *digit = "0123456789abcdef"[value & 15];
  return text;
}

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
Checksum::~Checksum() = default;

void Checksum::add(std::string_view bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::string Checksum::hex() const { return hex_digits(XXH3_64bits_digest(&state_->xxh3)); }

}  // namespace moxie::cli
