// Binary operators of reductions.
#pragma once
#include <cstdint>

#include "hostweave/device.h"

namespace hw {

template <class T>
struct Indexed {  // an element and its index
  T value;
  int64_t index;
};

// Accumulator of floats. On the CPU device, one thread adds all terms, in f64 with compensation. On a GPU,
// threads usually share a long sum. Each thread then adds fewer terms, so the sum has no compensation.
#ifdef __CUDACC__
template <class T>
using Sum = T;
#else
template <class T>
struct Sum {
  double rounded = 0, rest = 0;

  void operator+=(T term) {
    const double sum = rounded + term, added = sum - rounded;
    rest += (rounded - (sum - added)) + (term - added);
    rounded = sum;
  }
  operator T() const {
    const double sum = rounded + rest;
    return static_cast<T>(sum == sum ? sum : rounded);  // the compensation of infinities is NaN
  }
};
#endif

// Integers wrap around; signed overflow would be undefined behaviour.
#define HW_OPERATOR(Name, op)                                                                  \
  struct Name {                                                                                \
    HW_DEVICE auto operator()(auto a, auto b) const -> decltype(a) {                           \
      if constexpr (requires { a % b; }) {                                                     \
        return static_cast<decltype(a)>(static_cast<uint64_t>(a) op static_cast<uint64_t>(b)); \
      } else {                                                                                 \
        return a op b;                                                                         \
      }                                                                                        \
    }                                                                                          \
  };
HW_OPERATOR(Add, +)
HW_OPERATOR(Multiply, *)
HW_OPERATOR(And, &)
HW_OPERATOR(Or, |)
HW_OPERATOR(Xor, ^)
#undef HW_OPERATOR

template <bool kLargest>
struct Extremum {  // Propagates NaN.
  template <class T>
  HW_DEVICE T operator()(T a, T b) const {
    return (kLargest ? a > b : a < b) || a != a ? a : b;
  }
#ifdef __CUDACC__
  __device__ float operator()(float a, float b) const {  // The function compiles to a single instruction.
    if constexpr (kLargest) {
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    } else {
      asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    }
    return a;
  }
#endif
};
using Maximum = Extremum<true>;
using Minimum = Extremum<false>;

struct FirstMaximum {  // NaN is the largest number. The first of equal elements is the result.
  template <class T>
  HW_DEVICE Indexed<T> operator()(Indexed<T> a, Indexed<T> b) const {
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan ? a : b;
    if (a.value == b.value || a_is_nan) return a.index < b.index ? a : b;
    return a.value > b.value ? a : b;
  }
};

}  // namespace hw
