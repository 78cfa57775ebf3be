#include "moxie/torch/exchange/symmetric.h"

#include <ATen/ops/empty.h>

#include <atomic>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

Capacity capacity_of(const char* op, int64_t ranks, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(sizes.size() == 5, op,
                    ": capacity must be experts, rows, and bytes of tokens, of rows and of an "
                    "expert's bias, got ",
                    sizes.size(), " numbers");
  return {.ranks = ranks,
          .experts = sizes[0],
          .rows = sizes[1],
          .token_bytes = sizes[2],
          .row_bytes = sizes[3],
          .bias_bytes = sizes[4]};
}

const char* name_of(Step step) {
  switch (step) {
    case Step::kCounts: return "counts";
    case Step::kX: return "x";
    case Step::kY: return "y";
    case Step::kDy: return "dy";
    case Step::kDx: return "dx";
  }
  return "tokens";
}

// A matrix as rows of bytes. What a tensor without elements points to is not used.
View<std::byte> bytes_view(const Tensor& matrix) {
  return {static_cast<std::byte*>(matrix.mutable_data_ptr()),
          {matrix.size(0), matrix.size(1) * matrix.element_size()}};
}
View<const std::byte> const_bytes_view(const Tensor& matrix) {
  return {static_cast<const std::byte*>(matrix.const_data_ptr()),
          {matrix.size(0), matrix.size(1) * matrix.element_size()}};
}
// Nothing is a matrix without rows.
View<std::byte> bytes_or_none(const Tensor& matrix) {
  return matrix.defined() ? bytes_view(matrix) : View<std::byte>{nullptr, {0, 0}};
}
View<float> floats_or_none(const Tensor& matrix) {
  return matrix.defined() ? view<float>(matrix) : View<float>{nullptr, {0, 0}};
}
RowBytes<const std::byte> const_row_bytes(const Quantized& rows) {
  return {const_bytes_view(rows.data),
          rows.scale ? const_bytes_view(*rows.scale)
                     : View<const std::byte>{nullptr, {rows.data.size(0), 0}}};
}

std::vector<int64_t> exchange_capacity(int64_t ranks, int64_t experts, int64_t dim,
                                       at::IntArrayRef limits, at::ScalarType dtype,
                                       std::string_view recipe_text, std::string_view wire,
                                       bool bias) {
  constexpr const char* kOp = "_exchange_capacity";
  TORCH_CHECK_VALUE(limits.size() == 2, kOp, ": limits must be rows and tokens, got ",
                    limits.size(), " numbers");
  const Recipe recipe = parse_recipe(recipe_text, kOp);
  const auto element = static_cast<int64_t>(at::elementSize(dtype));
  // y has the recipe's dtype, dx that of x.
  const int64_t result =
      recipe.out ? max(element, static_cast<int64_t>(at::elementSize(*recipe.out))) : element;
  const int64_t token =
      wire == "fp8" ? fp8_row_bytes(dim, recipe.activations.cols) : plain_row_bytes(dim, element);
  // One rank reads its results where they are.
  const int64_t rows = ranks > 1 ? limits[0] * dim * result : 0;
  return {experts, limits[0], limits[1] * token, rows, bias ? dim * int64_t{sizeof(float)} : 0};
}

int64_t exchange_bytes(int64_t ranks, at::IntArrayRef capacity) {
  return regions_of(capacity_of("_exchange_bytes", ranks, capacity)).bytes;
}

void exchange_check(const Tensor& status, int64_t rank, int64_t ranks, int64_t timeout_ms,
                    std::string_view group) {
  check_status("expert_mlp", {.memory = {},
                              .status = status,
                              .peers = std::vector<int64_t>(static_cast<size_t>(ranks)),
                              .capacity = {},
                              .limits = {},
                              .rank = rank,
                              .timeout_ms = timeout_ms,
                              .group = std::string(group)});
}

}  // namespace

void check_status(const char* op, const SymmetricArgs& args) {
  const volatile auto* const found =
      reinterpret_cast<const volatile Status*>(args.status.const_data_ptr<int64_t>());
  const auto failure = static_cast<Failure>(found->failure);
  if (failure == Failure::kNone) return;
  // The device wrote the other fields first, and not every host reads in order.
  std::atomic_thread_fence(std::memory_order_acquire);
  const int64_t rank = found->rank, value = found->value, limit = found->limit;
  const char* const step = name_of(static_cast<Step>(found->step));
  const std::string here = "rank " + std::to_string(args.rank) + " of the " +
                           std::to_string(args.peers.size()) + " ranks of group '" + args.group +
                           "'";
  constexpr const char* kAfter = "; results since then are NaN, and the layers must be made again";
  switch (failure) {
    case Failure::kNone: return;
    case Failure::kRows:
      TORCH_CHECK(false, op, ": the experts of rank ", rank, " got ", value,
                  " rows, and max_rows is ", limit, " (seen on ", here, ")", kAfter);
    case Failure::kTokens:
      TORCH_CHECK(false, op, ": rank ", rank, " received ", value,
                  " tokens, and there is room for ", limit, ", ranks times max_tokens (seen on ",
                  here, ")", kAfter);
    case Failure::kSignature:
      TORCH_CHECK(
          false, op,
          ": recipe, wire, dtypes, sizes, activation, biases and whether gradients are wanted must "
          "be those of every rank, and rank ",
          rank, " differs from rank 0 (seen on ", here, ")", kAfter);
    case Failure::kStalled:
      TORCH_CHECK(false, op, ": the exchange of ", step, " failed on ", here,
                  "; no word from rank ", rank, " within ", args.timeout_ms, " ms", kAfter);
    case Failure::kElsewhere:
      TORCH_CHECK(false, op, ": rank ", rank, " came to the exchange of ",
                  name_of(static_cast<Step>(value)), " while ", here, " was at that of ", step,
                  "; every rank must run forward and backward of the same calls in the same order",
                  kAfter);
    case Failure::kPeer:
      TORCH_CHECK(false, op, ": the exchange of ", step, " failed on ", here, ", because rank ",
                  rank, " has failed", kAfter);
  }
}

Symmetric::Symmetric(const char* op, SymmetricArgs args) : op_(op), args_(std::move(args)) {
  const auto ranks = static_cast<int64_t>(args_.peers.size());
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMaxRanks, op, ": there must be 1 to ", kMaxRanks,
                    " ranks in shared memory, got ", ranks);
  TORCH_CHECK_VALUE(args_.rank >= 0 && args_.rank < ranks, op, ": rank must be 0 to ", ranks - 1,
                    ", got ", args_.rank);
  TORCH_CHECK_VALUE(args_.limits.size() == 2, op, ": limits must be rows and tokens, got ",
                    args_.limits.size(), " numbers");
  TORCH_CHECK_TYPE(args_.status.scalar_type() == at::kLong, op,
                   ": status must be torch.int64, got ", dtype_name(args_.status.scalar_type()));
  TORCH_CHECK_VALUE(args_.status.is_cpu() && args_.status.numel() == kStatusFields, op,
                    ": status must be ", kStatusFields, " numbers on the host, got ",
                    args_.status.sizes(), " on ", args_.status.device());
  memory_.capacity = capacity_of(op, ranks, args_.capacity);
  const int64_t bytes = regions_of(memory_.capacity).bytes;
  TORCH_CHECK_VALUE(args_.memory.scalar_type() == at::kByte && args_.memory.numel() >= bytes, op,
                    ": memory must be at least ", bytes, " bytes of torch.uint8, got ",
                    args_.memory.numel(), " of ", dtype_name(args_.memory.scalar_type()));
  memory_.rank = args_.rank;
  for (size_t r = 0; r < args_.peers.size(); ++r)
    memory_.base[r] = reinterpret_cast<std::byte*>(args_.peers[r]);  // NOLINT: addresses as ints
  memory_.status = static_cast<Status*>(args_.status.mutable_data_ptr());
  memory_.timeout_ns = args_.timeout_ms * 1'000'000;
  limits_ = {args_.limits[0], args_.limits[1]};
}

Symmetric::Places Symmetric::places(const Tensor& offs, const Tensor& row_of, const Tensor& weights,
                                    int32_t signature) const {
  const DeviceScope scope(args_.memory.device());
  const Tensor factors = dense(weights);
  const int64_t tokens = factors.size(0);
  const auto make = [&](at::IntArrayRef sizes) { return at::empty(sizes, offs.options()); };
  const Places made{make({3, row_of.numel()}), make({expert_places(local_experts())}),
                    make({tokens}), tokens, factors.size(1)};
  const Tensor workspace = make(
      {args_.memory.is_cpu() ? 0 : exchange_workspace(tokens, size(), memory_.capacity.experts)});
  exchange_places({.memory = memory_,
                   .limits = limits_,
                   .offs = const_view<int32_t>(offs),
                   .row_of = const_view<int32_t>(row_of),
                   .weights = const_view<float>(factors),
                   .signature = signature,
                   .slots = view<int32_t>(made.slots),
                   .experts = view<int32_t>(made.experts),
                   .own = view<int32_t>(made.own),
                   .workspace = view<int32_t>(workspace)},
                  scope.exec());
  return made;
}

void Symmetric::send(const Quantized& tokens, const Places& places, Step step) const {
  const DeviceScope scope(args_.memory.device());
  const Quantized from{dense(tokens.data), dense(tokens.scale)};
  send_tokens({.memory = memory_,
               .limits = limits_,
               .tokens = const_row_bytes(from),
               .slots = const_view<int32_t>(places.slots),
               .step = step},
              scope.exec());
}

Quantized Symmetric::send_quantized(const Tensor& tokens, Block block, ScaleRule rule,
                                    const Places& places, Step step) const {
  const DeviceScope scope(args_.memory.device());
  const Tensor from = dense(tokens);
  const int64_t count = from.size(0), dim = from.size(1);
  const Quantized made{at::empty({count, dim}, from.options().dtype(at::kFloat8_e4m3fn)),
                       at::empty({count, ceil_div<int64_t>(dim, block.cols)},
                                 from.options().dtype(at::kFloat8_e8m0fnu))};
  moxie::send_quantized(
      {.memory = memory_,
       .limits = limits_,
       .x = const_float_view(from),
       .slots = const_view<int32_t>(places.slots),
       .step = step,
       .rule = rule,
       .tokens = {.block = block,
                  .qdata = {static_cast<e4m3*>(made.data.mutable_data_ptr()), {count, dim}},
                  .scale = {static_cast<e8m0*>(made.scale->mutable_data_ptr()),
                            {count, made.scale->size(1)}}}},
      scope.exec());
  return made;
}

Symmetric::Pairs Symmetric::pairs(const Places& places) const {
  const DeviceScope scope(args_.memory.device());
  const auto options = places.experts.options();
  const Pairs made{at::empty({limits_.rows}, options),
                   at::empty({limits_.rows}, options.dtype(at::kFloat))};
  receive_pairs({.memory = memory_,
                 .limits = limits_,
                 .experts = const_view<int32_t>(places.experts),
                 .row_token = view<int32_t>(made.token),
                 .row_weight = view<float>(made.weight)},
                scope.exec());
  return made;
}

Quantized Symmetric::gather(Tokens which, const Quantized& tokens, const OptionalTensor& row_token,
                            const Places& places) const {
  const DeviceScope scope(args_.memory.device());
  const int64_t count = row_token ? limits_.rows : limits_.tokens;
  const auto make = [&](const Tensor& tensor) {
    return at::empty({count, tensor.size(1)}, tensor.options());
  };
  const Quantized from{dense(tokens.data), dense(tokens.scale)};
  Quantized made{make(from.data), {}};
  if (from.scale) made.scale = make(*from.scale);
  gather_rows(
      {.memory = memory_,
       .tokens = const_row_bytes(from),
       .own =
           which == Tokens::kSent ? std::optional(const_view<int32_t>(places.own)) : std::nullopt,
       .experts = const_view<int32_t>(places.experts),
       .row_token = row_token ? std::optional(const_view<int32_t>(*row_token)) : std::nullopt,
       .rows = {bytes_view(made.data),
                made.scale ? bytes_view(*made.scale) : View<std::byte>{nullptr, {count, 0}}}},
      scope.exec());
  return made;
}

Quantized Symmetric::received(const Quantized& sent, const Places& places) const {
  return gather(Tokens::kSent, sent, {}, places);
}
Quantized Symmetric::rows(const Quantized& sent, const Places& places,
                          const Tensor& row_token) const {
  return gather(Tokens::kSent, sent, row_token, places);
}
Quantized Symmetric::rows_of(const Quantized& kept, const Places& places,
                             const Tensor& row_token) const {
  return gather(Tokens::kKept, kept, row_token, places);
}

Symmetric::AtTokens Symmetric::combine(const Results& results, const Places& places,
                                       const OptionalTensor& weights, Step step) const {
  const DeviceScope scope(args_.memory.device());
  std::optional<ConstFloatView> rows;
  std::optional<View<const float>> of_pairs;
  const Tensor from = results.rows.defined() ? dense(results.rows) : Tensor();
  const Tensor values = results.of_pairs.defined() ? dense(results.of_pairs) : Tensor();
  const OptionalTensor factors = dense(weights);
  AtTokens made;
  CombineArgs args{
      .memory = memory_, .limits = limits_, .slots = const_view<int32_t>(places.slots)};
  if (from.defined()) {
    made.x = at::empty({places.tokens, from.size(1)}, from.options());
    args.rows = const_float_view(from);
    args.x = float_view(made.x);
  }
  if (values.defined()) {
    made.of_slots = at::empty({places.tokens, places.top_k}, values.options());
    args.of_pairs = const_view<float>(values);
    args.of_slots = view<float>(made.of_slots);
  }
  if (factors) args.weights = const_view<float>(*factors);
  send_rows({.memory = memory_,
             .experts = const_view<int32_t>(places.experts),
             .rows = args.rows,
             .of_pairs = args.of_pairs,
             .step = step},
            scope.exec());
  moxie::combine(args, scope.exec());
  return made;
}

void Symmetric::check_bias(const Tensor& b2) const {
  const int64_t bytes = b2.size(-1) * int64_t{sizeof(float)};
  TORCH_CHECK_VALUE(bytes <= memory_.capacity.bias_bytes, op_, ": b2 of an expert needs ", bytes,
                    " bytes, and the shared memory has ", memory_.capacity.bias_bytes);
}

void Symmetric::send_bias(const Bias& own) const {
  const DeviceScope scope(args_.memory.device());
  const Tensor b2 = own.b2.defined() ? dense(own.b2) : Tensor();
  const Tensor sums = own.sums.defined() ? dense(own.sums) : Tensor();
  const auto bytes = bytes_or_none(b2);
  const auto floats = floats_or_none(sums);
  moxie::send_bias(
      {.memory = memory_, .b2 = {bytes.data, bytes.shape}, .sums = {floats.data, floats.shape}},
      scope.exec());
}

Symmetric::Bias Symmetric::receive_bias(const Bias& own) const {
  const DeviceScope scope(args_.memory.device());
  Bias all;
  if (own.b2.defined())
    all.b2 = at::empty({memory_.capacity.experts, own.b2.size(1)}, own.b2.options());
  if (own.sums.defined()) all.sums = at::empty(own.sums.sizes(), own.sums.options());
  moxie::receive_bias(
      {.memory = memory_, .b2 = bytes_or_none(all.b2), .sums = floats_or_none(all.sums)},
      scope.exec());
  if (all.sums.defined()) all.sums = all.sums.unflatten(0, {size(), local_experts()});
  return all;
}

TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_exchange_capacity", TORCH_FN(exchange_capacity));
  m.impl("_exchange_bytes", TORCH_FN(exchange_bytes));
  m.impl("_exchange_check", TORCH_FN(exchange_check));
}

}  // namespace moxie::ops
