// Integer arithmetic that every layer needs. Templates, because torch's symbolic sizes go through
// the same formulas as plain integers. By value: a reference to a namespace-scope constant would be
// one to host memory in device code, and nvcc turns that into a trap.
#pragma once

namespace moxie {

template <class Int>
constexpr Int ceil_div(Int value, Int divisor) {
  return (value + (divisor - 1)) / divisor;
}

template <class Int>
constexpr Int round_up(Int value, Int multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <class Int>
constexpr Int min(Int a, Int b) {
  return b < a ? b : a;
}

template <class Int>
constexpr Int max(Int a, Int b) {
  return a < b ? b : a;
}

}  // namespace moxie
