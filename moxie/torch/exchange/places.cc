#include "moxie/torch/exchange/places.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>

#include "moxie/core/message_places/message_places.h"
#include "moxie/torch/exec.h"

namespace moxie::ops {
namespace {

// Bits of the flags that each rank sends about its call.
enum Flag : int32_t { kAutograd = 1, kDx = 2, kDweights = 4, kDb2 = 8 };

int32_t bits_of(const CallFlags& flags) {
  return (flags.autograd ? kAutograd : 0) | (flags.dx ? kDx : 0) |
         (flags.dweights ? kDweights : 0) | (flags.db2 ? kDb2 : 0);
}

std::vector<int64_t> column(const Tensor& host, int64_t at) {
  const auto rows = host.accessor<int32_t, 2>();
  std::vector<int64_t> values;
  for (int64_t i = 0; i < rows.size(0); ++i) values.push_back(rows[i][at]);
  return values;
}

Traffic traffic_of(const Tensor& host, int64_t experts) {
  Traffic traffic{column(host, column_of(BesideExperts::kTokens, experts)), {}};
  const auto rows = host.accessor<int32_t, 2>();
  for (int64_t i = 0; i < rows.size(0); ++i)
    traffic.pairs.push_back(std::accumulate(rows[i].data(), rows[i].data() + experts, int64_t{0}));
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

struct Sent {
  Tensor counts, token_of, row_in_message;
};

Sent places_of_sent(const RouteOfTokens& route, int64_t ranks, const CallFlags& flags) {
  const auto int32 = route.offs.options();
  const int64_t slots = route.slot_of.size(0);
  const Sent sent{at::empty({ranks, route.local_experts + kCountsBesideExperts}, int32),
                  at::empty({slots}, int32.dtype(at::kLong)), at::empty({slots}, int32)};
  const int64_t size = route.offs.is_cpu() ? 0 : sent_places_workspace(slots, ranks);
  const Tensor workspace = at::empty({size}, int32);
  const DeviceScope scope(route.offs.device());
  sent_places({.offs = const_view<int32_t>(route.offs),
               .slot_of = const_view<int32_t>(route.slot_of),
               .row_of = const_view<int32_t>(route.row_of.view({-1, route.top_k})),
               .ranks = ranks,
               .flags = bits_of(flags),
               .signature = flags.signature,
               .counts = view<int32_t>(sent.counts),
               .token_of = view<int64_t>(sent.token_of),
               .row_in_message = view<int32_t>(sent.row_in_message),
               .workspace = view<int32_t>(workspace)},
              scope.exec());
  return sent;
}

}  // namespace

int64_t Traffic::num_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), 0L); }
int64_t Traffic::num_pairs() const { return std::accumulate(pairs.begin(), pairs.end(), 0L); }

CopyToHost::CopyToHost(const Tensor& from)
    : source_(from),
      host_(
          at::empty(from.sizes(), from.options().device(at::kCPU).pinned_memory(!from.is_cpu()))) {
  host_.copy_(from, /*non_blocking=*/!from.is_cpu());
  if (from.is_cpu()) return;
  const c10::impl::VirtualGuardImpl device(from.device().type());
  done_.emplace(from.device().type());
  done_->record(device.getStream(from.device()));
}

const Tensor& CopyToHost::wait() const {
  if (done_) done_->synchronize();
  return host_;
}

CountsExchange::CountsExchange(const Group& group, const char* op, const RouteOfTokens& route,
                               const CallFlags& flags)
    : group_(group), op_(op), flags_(flags) {
  if (route.offs.is_cpu()) agree_on_experts(group, op, route.local_experts);
  const Sent sent = places_of_sent(route, group.size(), flags);
  places_.token_of = sent.token_of;
  row_in_message_ = sent.row_in_message;
  const std::vector<int64_t> ones(static_cast<size_t>(group.size()), 1);
  received_ = group.all_to_all(sent.counts, {ones, ones}, "counts");
  copy_.emplace(at::cat({sent.counts, received_}));
}

Agreed CountsExchange::wait() {
  const int64_t world = group_.size(), experts = received_.size(1) - kCountsBesideExperts;
  const Tensor& host = copy_->wait();
  const Tensor host_in = host.narrow(0, world, world);
  const auto beside = [&](BesideExperts what) { return column(host_in, column_of(what, experts)); };
  const CallFlags agreed =
      agree(group_, op_, beside(BesideExperts::kFlags), beside(BesideExperts::kSignature), flags_);
  places_.out = traffic_of(host.narrow(0, 0, world), experts);
  places_.in = traffic_of(host_in, experts);
  places_.token_of = places_.token_of.narrow(0, 0, places_.out.num_tokens());
  return {places_, received_, agreed};
}

}  // namespace moxie::ops
