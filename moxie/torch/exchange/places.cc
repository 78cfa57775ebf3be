#include "moxie/torch/exchange/places.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <optional>

#include "moxie/core/layout/wire.h"

namespace moxie::ops {
namespace {

// Bits of the flags that each rank sends about its call.
enum Flag : int32_t { kAutograd = 1, kDx = 2, kDweights = 4, kDb2 = 8 };

int32_t bits_of(const CallFlags& flags) {
  return (flags.autograd ? kAutograd : 0) | (flags.dx ? kDx : 0) |
         (flags.dweights ? kDweights : 0) | (flags.db2 ? kDb2 : 0);
}

// The columns of a rank's counts after one column per expert.
enum Column : int64_t { kTokens, kFlags, kSignature };
static_assert(kSignature + 1 == kCountsBesideExperts);

// For each rank and token: whether the token goes to the rank, and in which row of the message.
struct Visits {
  Tensor goes;  // bool [W, T]
  Tensor row;   // int32 [W, T]: how many tokens before this one go there
  Tensor rank;  // int64 [T * k]: the rank that each slot goes to
};

Visits visits_of(const RouteOfTokens& route, int64_t world) {
  const int64_t tokens = route.slot_of.size(0) / route.top_k;
  // The ends of the rows for each rank: offs at its last expert.
  const Tensor ends = route.offs.view({world, route.local_experts}).select(1, -1).contiguous();
  const Tensor rank = at::searchsorted(ends, route.row_of, /*out_int32=*/false, /*right=*/true);
  const Tensor goes = at::zeros({tokens, world}, rank.options().dtype(at::kBool))
                          .scatter_(1, rank.view({tokens, route.top_k}), true)
                          .t()
                          .contiguous();
  return {goes, goes.cumsum(1, at::kInt).sub_(1), rank};
}

std::vector<int64_t> column(const Tensor& host, int64_t at) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < host.size(0); ++i) values.push_back(host[i][at].item<int32_t>());
  return values;
}

Traffic traffic_of(const Tensor& host, int64_t experts) {
  Traffic traffic{column(host, experts + kTokens), {}};
  const Tensor pairs = host.narrow(1, 0, experts).sum(1);
  for (int64_t i = 0; i < host.size(0); ++i) traffic.pairs.push_back(pairs[i].item<int64_t>());
  return traffic;
}

std::string names(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

CallFlags agree(const Group& group, const char* op, const std::vector<int64_t>& bits,
                const std::vector<int64_t>& signatures, CallFlags own) {
  std::vector<int64_t> other_signature, other_autograd;
  for (int64_t i = 0; i < group.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    if (signatures[at] != own.signature) other_signature.push_back(i);
    if (((bits[at] & kAutograd) != 0) != own.autograd) other_autograd.push_back(i);
    own.dx = own.dx || (bits[at] & kDx);
    own.dweights = own.dweights || (bits[at] & kDweights);
    own.db2 = own.db2 || (bits[at] & kDb2);
  }
  TORCH_CHECK_VALUE(
      other_signature.empty(), op,
      ": recipe, wire, dtypes, sizes, biases and activation must be those of every rank of group '",
      group.name(), "', and rank ", group.rank(), " differs from ", names(other_signature));
  TORCH_CHECK_VALUE(other_autograd.empty(), op, ": backward exchanges too, so all ranks of group '",
                    group.name(), "' need gradients or none does; rank ", group.rank(),
                    own.autograd ? " does, and not " : " does not, but ", names(other_autograd));
  return own;
}

// A message of counts is as long as its receiver has experts, and Gloo ends a process that gets a
// longer one than it expects. So on a CPU the number of experts goes first, in messages of one
// length. On a GPU that would be one more wait for the device, and NCCL does not compare lengths.
void agree_on_experts(const Group& group, const char* op, int64_t experts) {
  const std::vector<int64_t> ones(static_cast<size_t>(group.size()), 1);
  const Tensor own = at::full({group.size(), 1}, experts, at::kInt);
  const auto all = column(group.all_to_all(own, {ones, ones}, "numbers of experts"), 0);
  for (size_t rank = 0; rank < all.size(); ++rank)
    TORCH_CHECK_VALUE(all[rank] == experts, op,
                      ": w13 must have as many experts on every rank of group '", group.name(),
                      "', got ", experts, " on rank ", group.rank(), " and ", all[rank],
                      " on rank ", rank);
}

// A copy to the host that has been issued, but not waited for. From a GPU it goes to pinned memory,
// on the current stream, and an event marks its end: until wait() the host queues other work.
class CopyToHost {
 public:
  explicit CopyToHost(const Tensor& from)
      : source_(from),
        host_(at::empty(from.sizes(),
                        from.options().device(at::kCPU).pinned_memory(!from.is_cpu()))) {
    host_.copy_(from, /*non_blocking=*/!from.is_cpu());
    if (from.is_cpu()) return;
    const c10::impl::VirtualGuardImpl device(from.device().type());
    done_.emplace(from.device().type());
    done_->record(device.getStream(from.device()));
  }
  const Tensor& wait() const {
    if (done_) done_->synchronize();
    return host_;
  }

 private:
  Tensor source_;  // kept so that it is not freed while it is copied
  Tensor host_;
  std::optional<c10::Event> done_;
};

Tensor sums_before(const Tensor& counts) { return counts.cumsum(0) - counts; }

}  // namespace

int64_t Traffic::num_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), 0L); }
int64_t Traffic::num_pairs() const { return std::accumulate(pairs.begin(), pairs.end(), 0L); }

Agreed exchange_counts(const Group& group, const char* op, const RouteOfTokens& route,
                       const CallFlags& flags) {
  const int64_t world = group.size(), experts = route.local_experts;
  if (route.offs.is_cpu()) agree_on_experts(group, op, experts);
  const Visits visits = visits_of(route, world);
  const auto int32 = route.offs.options();
  const Tensor counts = at::diff(route.offs, 1, 0, at::zeros({1}, int32)).view({world, experts});
  const Tensor sent = at::cat(
      {counts, visits.goes.sum(1, true, at::kInt), at::full({world, 1}, bits_of(flags), int32),
       at::full({world, 1}, flags.signature, int32)},
      1);
  const std::vector<int64_t> ones(static_cast<size_t>(world), 1);
  const Tensor received = group.all_to_all(sent, {ones, ones}, "counts");
  const CopyToHost copy(at::cat({sent, received}));

  // While the copy runs, queues the work that needs no number on the host.
  const int64_t tokens = visits.goes.size(1);
  const auto int64 = int32.dtype(at::kLong);
  const Tensor first = sums_before(visits.goes.sum(1)).unsqueeze(1);
  const Tensor slots = route.slot_of.to(at::kLong);
  const Tensor token = slots.div(route.top_k, "floor");
  const Tensor counts_in = received.narrow(1, 0, experts).to(at::kLong).contiguous();
  const Tensor arrival = sums_before(counts_in.flatten()).view({world, experts}).t().flatten();
  const Tensor lengths = counts_in.t().flatten();
  const Tensor shift = arrival - sums_before(lengths);
  Places places;
  places.row_in_message =
      visits.row.flatten().index_select(0, visits.rank.index_select(0, slots) * tokens + token);
  places.offs = counts_in.sum(0).cumsum(0).to(at::kInt);
  const Tensor tokens_before = sums_before(received.select(1, experts + kTokens).to(at::kLong));
  const Tensor pairs_of_rank = counts_in.sum(1);

  const Tensor& host = copy.wait();
  const Tensor host_in = host.narrow(0, world, world);
  const CallFlags agreed = agree(group, op, column(host_in, experts + kFlags),
                                 column(host_in, experts + kSignature), flags);
  places.out = traffic_of(host.narrow(0, 0, world), experts);
  places.in = traffic_of(host_in, experts);

  // Lists the tokens to send, in order of rank, then token. A token that does not go to a rank is
  // written to one extra element at the end, which is dropped.
  const int64_t out_tokens = places.out.num_tokens();
  const Tensor place = at::where(visits.goes, visits.row + first, out_tokens);
  places.token_of = at::empty({out_tokens + 1}, int64)
                        .scatter_(0, place.flatten(), at::arange(tokens, int64).repeat({world}))
                        .narrow(0, 0, out_tokens);
  // For each row of the experts, the pair that it holds: pairs arrive ordered by rank, then expert,
  // and rows are ordered by expert, then rank.
  const int64_t pairs = places.in.num_pairs();
  const Tensor rows = at::arange(pairs, int64);
  places.arrival_of = at::repeat_interleave(shift, lengths, std::nullopt, pairs) + rows;
  places.row_of_arrival = at::empty({pairs}, int64).scatter_(0, places.arrival_of, rows);
  places.first_of_pair = at::repeat_interleave(tokens_before, pairs_of_rank, std::nullopt, pairs);
  return {places, agreed};
}

}  // namespace moxie::ops
