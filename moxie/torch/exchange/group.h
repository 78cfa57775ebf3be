// A process group of torch, found by the name under which torch's functional collectives know it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <string>
#include <vector>

namespace moxie::ops {

class Group {
 public:
  // op: the name of the calling op, for error messages.
  Group(const std::string& name, const char* op);

  int64_t rank() const { return group_->getRank(); }
  int64_t size() const { return group_->getSize(); }
  const std::string& name() const { return name_; }

  // Sends one message to every rank: `send` holds their rows in order of rank, and so does the
  // result for the messages received. `what` names the data in errors. If the exchange fails, every
  // living rank throws an error that names its rank, the group, and the ranks that did not answer.
  struct Sizes {
    const std::vector<int64_t>&send, &receive;  // number of rows for each rank
  };
  at::Tensor all_to_all(const at::Tensor& send, const Sizes& sizes, const char* what) const;
  at::Tensor all_reduce(const at::Tensor& x, const char* what) const;  // the sum

 private:
  template <class Body>
  at::Tensor named_failure(const char* what, Body&& body) const;
  std::string failure(const char* what, const char* why) const;

  std::string name_;
  const char* op_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace moxie::ops
