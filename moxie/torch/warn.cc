#include "moxie/torch/warn.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace moxie::ops {
namespace {

// Finds a function of Python's C API in the running process; nullptr in a C++ program. Warnings go
// there directly, because torch passes C++ warnings on to Python only for its own functions, not
// for custom ops. The lookup is at run time, so that this library need not link Python.
template <class Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

void warn(const std::string& message) {
  const auto is_initialized = find<int()>("Py_IsInitialized");
  if (!is_initialized || !is_initialized()) {
    TORCH_WARN(message);
    return;
  }
  const auto ensure = find<int()>("PyGILState_Ensure");
  const auto release = find<void(int)>("PyGILState_Release");
  const auto warn_ex = find<int(void*, const char*, long)>("PyErr_WarnEx");
  const auto clear = find<void()>("PyErr_Clear");
  void* const category = *static_cast<void**>(dlsym(RTLD_DEFAULT, "PyExc_UserWarning"));
  const int state = ensure();
  const bool is_error = warn_ex(category, message.c_str(), 1) != 0;
  if (is_error) clear();
  release(state);
  TORCH_CHECK(!is_error, message);
}

}  // namespace moxie::ops
