// Integer arithmetic that every layer needs. Templates, because torch's symbolic sizes go through
// the same formulas as plain integers.
#pragma once

namespace moxie {

template <class Int>
constexpr Int ceil_div(const Int& value, const Int& divisor) {
  return (value + (divisor - 1)) / divisor;
}

template <class Int>
constexpr Int round_up(const Int& value, const Int& multiple) {
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
