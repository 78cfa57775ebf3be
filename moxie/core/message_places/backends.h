// The backends of both ops; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/message_places/message_places.h"

namespace moxie {

namespace ref {
void sent_places(const SentPlacesArgs& args);
void received_places(const ReceivedPlacesArgs& args);
}  // namespace ref
namespace cuda {
void sent_places(const SentPlacesArgs& args, void* stream);
void received_places(const ReceivedPlacesArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
