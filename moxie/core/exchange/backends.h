// The backends of the exchange; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/exchange/exchange.h"

namespace moxie {

namespace ref {
void exchange_places(const ExchangePlacesArgs& args);
void send_tokens(const SendTokensArgs& args);
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
void receive_pairs(const ReceivePairsArgs& args, void* stream);
void gather_rows(const GatherRowsArgs& args, void* stream);
void send_rows(const SendRowsArgs& args, void* stream);
void combine(const CombineArgs& args, void* stream);
void send_bias(const SendBiasArgs& args, void* stream);
void receive_bias(const ReceiveBiasArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
