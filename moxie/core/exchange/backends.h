// The backends of the exchange; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/exchange/exchange.h"
#include "moxie/core/quantize/quantize.h"

namespace moxie {

// send_quantized() as two steps, for backends without a kernel that does both.
inline QuantizeArgs as_quantize(const SendQuantizedArgs& args) {
  return {.x = args.x, .rowwise = args.tokens, .rule = args.rule};
}
inline SendTokensArgs as_send_tokens(const SendQuantizedArgs& args) {
  const auto& qdata = args.tokens.qdata;
  const auto& scale = args.tokens.scale;
  return {.memory = args.memory,
          .limits = args.limits,
          .tokens = {{reinterpret_cast<const std::byte*>(qdata.data), qdata.shape},
                     {reinterpret_cast<const std::byte*>(scale.data), scale.shape}},
          .slots = args.slots,
          .step = args.step};
}

namespace ref {
void exchange_places(const ExchangePlacesArgs& args);
void send_tokens(const SendTokensArgs& args);
void send_quantized(const SendQuantizedArgs& args);
void receive_pairs(const ReceivePairsArgs& args);
void gather_rows(const GatherRowsArgs& args);
void send_rows(const SendRowsArgs& args);
void combine(const CombineArgs& args);
void send_bias(const SendBiasArgs& args);
void receive_bias(const ReceiveBiasArgs& args);
}  // namespace ref
namespace cuda {
void exchange_places(const ExchangePlacesArgs& args, void* stream);
void send_tokens(const SendTokensArgs& args, void* stream);
void send_quantized(const SendQuantizedArgs& args, void* stream);
void receive_pairs(const ReceivePairsArgs& args, void* stream);
void gather_rows(const GatherRowsArgs& args, void* stream);
void send_rows(const SendRowsArgs& args, void* stream);
void combine(const CombineArgs& args, void* stream);
void send_bias(const SendBiasArgs& args, void* stream);
void receive_bias(const ReceiveBiasArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
