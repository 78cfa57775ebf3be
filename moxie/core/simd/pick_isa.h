// Picks the build of a kernel for an Exec's instruction set.
#pragma once

#include <cstddef>
#include <string_view>

#include "moxie/core/base/check.h"
#include "moxie/core/base/exec.h"

namespace moxie::cpu {

constexpr const char* name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline: return "baseline";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "?";
}

// Refuses an instruction set that the machine lacks, also in ops that have only one build.
inline void check_isa(std::string_view op, const Exec& exec) {
  MOXIE_CHECK(exec.isa <= best_isa(), op, ": this machine runs ", name(best_isa()),
              " at most, got isa ", name(exec.isa));
}

// The arguments are the builds of one function, weakest set first: MOXIE_EACH_ISA(function).
template <class Function, class... Stronger>
Function* pick_isa(std::string_view op, const Exec& exec, Function* baseline,
                   Stronger*... stronger) {
  check_isa(op, exec);
  Function* const builds[] = {baseline, stronger...};
  return builds[static_cast<size_t>(exec.isa)];
}

}  // namespace moxie::cpu
