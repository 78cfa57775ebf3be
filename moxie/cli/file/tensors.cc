#include "moxie/cli/file/tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <utility>

#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

constexpr std::pair<std::string_view, at::ScalarType> kTypes[] = {{"BOOL", at::kBool},
                                                                  {"U8", at::kByte},
                                                                  {"I8", at::kChar},
                                                                  {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                  {"F8_E5M2", at::kFloat8_e5m2},
                                                                  {"F8_E8M0", at::kFloat8_e8m0fnu},
                                                                  {"I16", at::kShort},
                                                                  {"U16", at::kUInt16},
                                                                  {"F16", at::kHalf},
                                                                  {"BF16", at::kBFloat16},
                                                                  {"I32", at::kInt},
                                                                  {"U32", at::kUInt32},
                                                                  {"F32", at::kFloat},
                                                                  {"F64", at::kDouble},
                                                                  {"I64", at::kLong},
                                                                  {"U64", at::kUInt64},
                                                                  {"C64", at::kComplexFloat}};

std::string word_of(at::ScalarType type) {
  for (const auto& [word, known] : kTypes)
    if (known == type) return std::string(word);
  fail("safetensors has no dtype for ", c10::toString(type));
}

}  // namespace

at::ScalarType scalar_type_of(const TensorEntry& entry) {
  for (const auto& [word, type] : kTypes)
    if (word == entry.dtype) return type;
  fail("tensor '", entry.name, "': torch has no dtype ", entry.dtype);
}

at::Tensor tensor_of(const TensorEntry& entry) {
  const at::ScalarType type = scalar_type_of(entry);
  const at::Tensor bytes =
      at::from_blob(const_cast<char*>(entry.bytes.data()), {std::ssize(entry.bytes)}, at::kByte);
  const auto address = reinterpret_cast<uintptr_t>(entry.bytes.data());
  const bool aligned = address % c10::elementSize(type) == 0;
  return (aligned ? bytes : bytes.clone()).view(type).view(entry.shape);
}

void write_tensors(const std::string& path, const Metadata& metadata,
                   const std::vector<NamedTensor>& tensors, const BeforeCommit& before_commit) {
  std::vector<TensorToWrite> list;
  at::Tensor on_host;  // the tensor being written
  for (const NamedTensor& named : tensors)
    list.push_back({named.name, word_of(named.tensor.scalar_type()), named.tensor.sizes().vec(),
                    [&on_host, tensor = named.tensor] {
                      on_host = tensor.detach().cpu().contiguous();
                      return std::string_view(static_cast<const char*>(on_host.const_data_ptr()),
                                              on_host.nbytes());
                    }});
  write_safetensors(path, metadata, list, before_commit);
}

}  // namespace moxie::cli
