// Neighbouring elements that a thread loads and stores at once.
#pragma once

#include <cstdint>

namespace moxie::cuda {

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T value[kVector];
};

inline constexpr int kWideVector = 4;  // 16 bytes of f32

template <class T>
bool is_wide_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (kWideVector * sizeof(T)) == 0;
}

template <int kVector, class T>
__device__ Vector<T, kVector> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kVector>*>(from);
}
template <int kVector, class T>
__device__ void store(T* to, const Vector<T, kVector>& values) {
  *reinterpret_cast<Vector<T, kVector>*>(to) = values;
}

}  // namespace moxie::cuda
