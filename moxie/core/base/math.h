// Integer arithmetic that every layer needs. These are templates because torch's symbolic sizes use
// the same formulas as plain integers. They take arguments by value because in device code a
// reference to a namespace-scope constant refers to host memory, and nvcc turns that into a trap.
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
