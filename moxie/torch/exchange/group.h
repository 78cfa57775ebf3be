// A process group of torch, by the name that its functional collectives know it by.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <string>
#include <vector>

namespace moxie::ops {

class Group {
 public:
  // op: what messages call the op that exchanges.
  Group(const std::string& name, const char* op);

  int64_t rank() const { return group_->getRank(); }
  int64_t size() const { return group_->getSize(); }
  const std::string& name() const { return name_; }

  // One message for every rank, in order of rank, as rows of `send`; what comes back is likewise in
  // order of rank. `what` is what errors call it. A failure is an error on every rank that lives:
  // it names this rank, the group, and those that did not answer.
  struct Sizes {
    const std::vector<int64_t>&send, &receive;  // rows, by rank
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
