// Calls an op through torch's dispatcher; its signature is deduced from the arguments:
//
//   dispatch<"moxie::top_k", at::Tensor>(scores, k);
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <type_traits>

namespace moxie::ops {

// A string as a template argument: "namespace::op" or "namespace::op.overload".
template <size_t kSize>
struct OpName {
  consteval OpName(const char (&text)[kSize]) { std::copy_n(text, kSize, value); }
  char value[kSize];
};

// The type with which the dispatcher passes an argument: tensors by reference, everything else by
// value.
template <class T>
using Passed = std::conditional_t<
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>, const T&, T>;

template <OpName kName, class Result, class... Args>
Result dispatch(const Args&... args) {
  static const auto op = [] {
    const std::string_view name = kName.value;
    const size_t dot = name.find('.');
    const std::string base(name.substr(0, dot));
    const std::string overload(dot == name.npos ? "" : name.substr(dot + 1));
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(base.c_str(), overload.c_str())
        .typed<Result(Passed<Args>...)>();
  }();
  return op.call(args...);
}

}  // namespace moxie::ops
