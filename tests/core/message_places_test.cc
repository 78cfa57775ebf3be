// Both ops on every backend of this machine, for all ranks of a group: each rank finds what it
// sends from a route of its own tokens, and what arrives from the counts that all ranks sent. What
// the places must be follows from the routes alone, pair by pair.
#include "moxie/core/message_places/message_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "moxie/core/base/check.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/values.h"

namespace moxie::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int32_t kPoison = -77;

struct Group {
  int64_t ranks, local, top_k;

  int64_t experts() const { return ranks * local; }
};

// The tokens of one rank and their route: rows sorted by expert, then slot.
struct Tokens {
  int64_t count;
  std::vector<int32_t> ids, offs, slot_of, row_of;
};

Tokens random_tokens(Random& random, const Group& group, int64_t count) {
  Tokens tokens{count, {}, std::vector<int32_t>(group.experts()), {}, {}};
  // Some experts get most tokens, some none.
  const int64_t popular = random.between(1, group.experts());
  for (int64_t t = 0; t < count; ++t) {
    std::vector<int32_t> chosen;
    while (std::ssize(chosen) < group.top_k) {
      const int64_t most = random.pick<int64_t>({popular, group.experts()});
      const auto id = static_cast<int32_t>(random.between(0, most - 1));
      // An expert may be chosen twice only where there are too few.
      if (std::count(chosen.begin(), chosen.end(), id) == 0 || popular < group.top_k)
        chosen.push_back(id);
    }
    tokens.ids.insert(tokens.ids.end(), chosen.begin(), chosen.end());
  }
  const auto slots = static_cast<int32_t>(tokens.ids.size());
  tokens.row_of.resize(slots);
  for (int32_t e = 0; e < group.experts(); ++e) {
    for (int32_t slot = 0; slot < slots; ++slot) {
      if (tokens.ids[slot] != e) continue;
      tokens.row_of[slot] = static_cast<int32_t>(tokens.slot_of.size());
      tokens.slot_of.push_back(slot);
    }
    tokens.offs[e] = static_cast<int32_t>(tokens.slot_of.size());
  }
  return tokens;
}

struct Sent {
  std::vector<int32_t> counts;
  std::vector<int64_t> token_of;
  std::vector<int32_t> row_in_message;
};

Sent sent_by(const NamedExec& on, const Group& group, const Tokens& tokens, int32_t signature) {
  const int64_t slots = tokens.count * group.top_k;
  const Backend backend = on.exec.backend;
  const int64_t fields = group.local + kCountsBesideExperts;
  Values<int32_t> offs(backend, tokens.offs), slot_of(backend, tokens.slot_of),
      row_of(backend, tokens.row_of),
      counts(backend, std::vector<int32_t>(group.ranks * fields, kPoison)),
      row_in_message(backend, std::vector<int32_t>(slots, kPoison)),
      workspace(
          backend,
          std::vector<int32_t>(
              backend == Backend::kCuda ? sent_places_workspace(slots, group.ranks) : 0, kPoison));
  Values<int64_t> token_of(backend, std::vector<int64_t>(slots, kPoison));
  sent_places({.offs = offs.const_view(),
               .slot_of = slot_of.const_view(),
               .row_of = {row_of.view().data, {tokens.count, group.top_k}},
               .ranks = group.ranks,
               .flags = 5,
               .signature = signature,
               .counts = {counts.view().data, {group.ranks, fields}},
               .token_of = token_of.view(),
               .row_in_message = row_in_message.view(),
               .workspace = workspace.view()},
              on.exec);
  return {counts.read(), token_of.read(), row_in_message.read()};
}

constexpr int64_t kRowBytes = 48;

struct Received {
  std::vector<int32_t> offs;
  std::vector<int64_t> row_of_arrival, token_of;
  std::vector<float> weights;
};

Received received_with(const NamedExec& on, const Group& group, const std::vector<int32_t>& all,
                       const std::vector<std::byte>& sent, int64_t pairs) {
  const Backend backend = on.exec.backend;
  Values<int32_t> counts(backend, all), offs(backend, std::vector<int32_t>(group.local, kPoison));
  Values<std::byte> messages(backend, sent);
  Values<int64_t> row_of_arrival(backend, std::vector<int64_t>(pairs, kPoison)),
      token_of(backend, std::vector<int64_t>(pairs, kPoison));
  Values<float> weights(backend, std::vector<float>(pairs, kPoison));
  received_places(
      {.counts = {counts.view().data, {group.ranks, group.local + kCountsBesideExperts}},
       .messages = messages.const_view(),
       .row_bytes = kRowBytes,
       .offs = offs.view(),
       .row_of_arrival = row_of_arrival.view(),
       .token_of = token_of.view(),
       .weights = weights.view()},
      on.exec);
  return {offs.read(), row_of_arrival.read(), token_of.read(), weights.read()};
}

// For each rank, the tokens that the message to it must have.
std::vector<std::vector<int64_t>> unique_tokens(const Group& group, const Tokens& tokens) {
  std::vector<std::vector<int64_t>> unique(group.ranks);
  for (int64_t t = 0; t < tokens.count; ++t)
    for (int64_t j = 0; j < group.top_k; ++j) {
      auto& of_rank = unique[tokens.ids[t * group.top_k + j] / group.local];
      if (of_rank.empty() || of_rank.back() != t) of_rank.push_back(t);
    }
  return unique;
}

// Counts of one message: pairs of each expert, tokens, flags, signature.
std::vector<int32_t> counts_to(int64_t rank, const Group& group, const Tokens& tokens,
                               int32_t signature) {
  std::vector<int32_t> counts(group.local, 0);
  for (const int32_t id : tokens.ids)
    if (id / group.local == rank) ++counts[id % group.local];
  counts.push_back(static_cast<int32_t>(unique_tokens(group, tokens)[rank].size()));
  counts.insert(counts.end(), {5, signature});
  return counts;
}

void expect_sent(const Group& group, const Tokens& tokens, const Sent& sent, int32_t signature) {
  const auto unique = unique_tokens(group, tokens);
  std::vector<int64_t> token_of;
  std::vector<int32_t> counts, row_in_message;
  for (int64_t r = 0; r < group.ranks; ++r) {
    const auto of_rank = counts_to(r, group, tokens, signature);
    counts.insert(counts.end(), of_rank.begin(), of_rank.end());
    token_of.insert(token_of.end(), unique[r].begin(), unique[r].end());
  }
  token_of.resize(tokens.ids.size(), 0);
  for (const int32_t slot : tokens.slot_of) {
    const auto& of_rank = unique[tokens.ids[slot] / group.local];
    const auto at = std::find(of_rank.begin(), of_rank.end(), slot / group.top_k);
    row_in_message.push_back(static_cast<int32_t>(at - of_rank.begin()));
  }
  EXPECT_EQ(sent.counts, counts);
  EXPECT_EQ(sent.token_of, token_of);
  EXPECT_EQ(sent.row_in_message, row_in_message);
}

// A pair by sender, expert and slot; its routing weight in these tests is a number of its own.
struct Pair {
  int64_t sender;
  int32_t expert, slot;
  int64_t token;  // among all tokens that the receiver gets
  float weight() const { return static_cast<float>(sender * 100000 + slot) + 0.5f; }
};

void expect_received(const NamedExec& on, const Group& group, const std::vector<Tokens>& ranks,
                     int64_t receiver) {
  std::vector<int32_t> counts;
  std::vector<std::byte> messages;
  std::vector<Pair> arrivals;
  int64_t first = 0;
  for (int64_t sender = 0; sender < group.ranks; ++sender) {
    const Tokens& tokens = ranks[sender];
    const auto of_rank = counts_to(receiver, group, tokens, 0);
    counts.insert(counts.end(), of_rank.begin(), of_rank.end());
    const auto unique = unique_tokens(group, tokens)[receiver];
    messages.resize(messages.size() + unique.size() * kRowBytes, std::byte{0xee});
    for (const int32_t slot : tokens.slot_of) {
      const int32_t expert = tokens.ids[slot];
      if (expert / group.local != receiver) continue;
      const auto at = std::find(unique.begin(), unique.end(), slot / group.top_k) - unique.begin();
      arrivals.push_back({sender, expert, slot, first + at});
      const PairOfX pair{static_cast<int32_t>(at), arrivals.back().weight()};
      const auto* const bytes = reinterpret_cast<const std::byte*>(&pair);
      messages.insert(messages.end(), bytes, bytes + sizeof(pair));
    }
    first += std::ssize(unique);
  }
  // Rows are ordered by expert, then sender, then slot.
  std::vector<int64_t> order(arrivals.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return arrivals[a].expert < arrivals[b].expert; });
  Received expected{
      std::vector<int32_t>(group.local), std::vector<int64_t>(arrivals.size()), {}, {}};
  for (int64_t row = 0; row < std::ssize(order); ++row) {
    const Pair& pair = arrivals[order[row]];
    expected.row_of_arrival[order[row]] = row;
    expected.token_of.push_back(pair.token);
    expected.weights.push_back(pair.weight());
    for (int64_t e = pair.expert % group.local; e < group.local; ++e) ++expected.offs[e];
  }
  const Received got = received_with(on, group, counts, messages, std::ssize(arrivals));
  EXPECT_EQ(got.offs, expected.offs);
  EXPECT_EQ(got.row_of_arrival, expected.row_of_arrival);
  EXPECT_EQ(got.token_of, expected.token_of);
  EXPECT_EQ(got.weights, expected.weights);
}

TEST(MessagePlaces, AreThoseThatTheRoutesGive) {
  Random random(1);
  const Group groups[] = {{1, 1, 1}, {1, 8, 2}, {2, 3, 4},  {4, 1, 2},  {4, 32, 8},
                          {3, 5, 5}, {8, 2, 1}, {5, 7, 40}, {33, 2, 6}, {128, 8, 8}};
  for (const NamedExec& on : backends_here())
    for (const Group& group : groups) {
      SCOPED_TRACE(on.name + ", ranks " + std::to_string(group.ranks) + ", experts " +
                   std::to_string(group.experts()) + ", top_k " + std::to_string(group.top_k));
      std::vector<Tokens> ranks;
      for (int64_t r = 0; r < group.ranks; ++r) {
        const auto count = random.pick<int64_t>({0, 1, 7, 128, group.ranks > 8 ? 3 : 1500});
        ranks.push_back(random_tokens(random, group, count));
        const auto signature = static_cast<int32_t>(random.between(-1000000, 1000000));
        expect_sent(group, ranks.back(), sent_by(on, group, ranks.back(), signature), signature);
      }
      for (int64_t r = 0; r<group.ranks; r += group.ranks> 8 ? 31 : 1)
        expect_received(on, group, ranks, r);
    }
}

TEST(MessagePlaces, HoldTheMostRanks) {
  Random random(2);
  const Group group{kMaxGroups - 1, 1, 3};
  const Tokens tokens = random_tokens(random, group, 400);
  for (const NamedExec& on : backends_here())
    expect_sent(group, tokens, sent_by(on, group, tokens, 9), 9);
}

TEST(MessagePlaces, StayWithinTheMessagesForARouteThatIsNone) {
  Random random(3);
  const Group group{4, 2, 3};
  for (const NamedExec& on : backends_here()) {
    if (on.exec.backend != Backend::kCuda) continue;
    Tokens tokens = random_tokens(random, group, 300);
    for (auto* numbers : {&tokens.slot_of, &tokens.row_of})
      for (int32_t& number : *numbers)
        number = random.pick<int32_t>({number, -5, INT32_MIN, INT32_MAX, 900, 0});
    const Sent sent = sent_by(on, group, tokens, 0);
    for (const int64_t token : sent.token_of) EXPECT_TRUE(token >= 0 && token < tokens.count);
    for (const int32_t row : sent.row_in_message) EXPECT_TRUE(row >= 0 && row < tokens.count);
  }
}

TEST(MessagePlaces, RefuseOnACpuWhatIsNoRoute) {
  const NamedExec cpu{"cpu", {.backend = Backend::kCpu}};
  const Group group{2, 1, 1};
  const Tokens wrong_slot{2, {0, 1}, {1, 2}, {0, 2}, {0, 1}},
      wrong_row{2, {0, 1}, {1, 2}, {0, 1}, {0, -1}};
  EXPECT_THAT([&] { sent_by(cpu, group, wrong_slot, 0); },
              ThrowsMessage<Error>(HasSubstr("sent_places: slot_of must be 0 to 1, got 2 at 1")));
  EXPECT_THAT([&] { sent_by(cpu, group, wrong_row, 0); },
              ThrowsMessage<Error>(HasSubstr("sent_places: row_of must be 0 to 1, got -1 at 1")));
}

TEST(MessagePlaces, RefuseWrongSizes) {
  const NamedExec cpu{"cpu", {.backend = Backend::kCpu}};
  const std::vector<int32_t> counts{1, 2, 2, 0, 0, 3, 1, 3, 0, 0};  // 7 pairs, 5 tokens
  const std::vector<std::byte> messages(5 * kRowBytes + 7 * kPairOfXBytes);
  EXPECT_THAT(
      [&] {
        received_with(cpu, {2, 2, 1}, counts, messages, 6);
      },
      ThrowsMessage<Error>(HasSubstr("received_places: row_of_arrival must have the 7 pairs")));
  EXPECT_THAT(
      [&] {
        received_with(cpu, {2, 2, 1}, counts, {}, 7);
      },
      ThrowsMessage<Error>(HasSubstr("received_places: messages must be [296]")));
  EXPECT_THAT(
      [&] {
        sent_by(cpu, {kMaxGroups, 1, 1}, {0, {}, std::vector<int32_t>(kMaxGroups), {}, {}}, 0);
      },
      ThrowsMessage<Error>(HasSubstr("sent_places: there must be 1 to 1023 ranks, got 1024")));
}

}  // namespace
}  // namespace moxie::testing
