#include "reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "types.h"

namespace hostweave::cpu {
namespace {

struct E4M3 {
  std::uint8_t bits;
};
struct E5M2 {
  std::uint8_t bits;
};

template <class T>
struct Arithmetic {
  // Integers wrap around, which only unsigned ones do by the rules of C++.
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};
template <>
struct Arithmetic<__half> {
  static float load(__half value) { return static_cast<float>(value); }
  static __half store(float value) { return __half(value); }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  static float load(__nv_bfloat16 value) { return static_cast<float>(value); }
  static __nv_bfloat16 store(float value) { return __nv_bfloat16(value); }
};
template <>
struct Arithmetic<E4M3> {
  static float load(E4M3 value) { return decode_e4m3(value.bits); }
  static E4M3 store(float value) { return {encode_e4m3(value)}; }
};
template <>
struct Arithmetic<E5M2> {
  static float load(E5M2 value) { return decode_e5m2(value.bits); }
  static E5M2 store(float value) { return {encode_e5m2(value)}; }
};

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  else
    return a + b;
}
template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  else
    return a * b;
}

constexpr std::size_t kPiece = 2048;  // its accumulators stay in the first-level cache

template <class T, class Combine, class Finish>
void reduce_pieces(const std::vector<const void*>& inputs, const std::vector<void*>& outputs, std::size_t begin, std::size_t end,
                   Combine combine, Finish finish) {
  using A = decltype(Arithmetic<T>::load(T{}));
  std::array<A, kPiece> sums;
  for (std::size_t at = begin; at < end; at += kPiece) {
    const std::size_t n = std::min(kPiece, end - at);
    const T* first = static_cast<const T*>(inputs[0]) + at;
    for (std::size_t i = 0; i < n; ++i) sums[i] = Arithmetic<T>::load(first[i]);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + at;
      for (std::size_t i = 0; i < n; ++i) sums[i] = combine(sums[i], Arithmetic<T>::load(next[i]));
    }
    for (void* output : outputs) {
      T* to = static_cast<T*>(output) + at;
      for (std::size_t i = 0; i < n; ++i) to[i] = Arithmetic<T>::store(finish(sums[i]));
    }
  }
}

template <class T>
void reduce_as(ncclRedOp_t reduction, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
               std::size_t begin, std::size_t end) {
  using A = decltype(Arithmetic<T>::load(T{}));
  const auto same = [](A a) { return a; };
  const A ranks = static_cast<A>(inputs.size());
  const auto sum = [](A a, A b) { return add(a, b); };
  switch (reduction) {
    case ncclSum:
      return reduce_pieces<T>(inputs, outputs, begin, end, sum, same);
    case ncclAvg:
      return reduce_pieces<T>(inputs, outputs, begin, end, sum, [=](A a) { return static_cast<A>(a / ranks); });
    case ncclProd:
      return reduce_pieces<T>(inputs, outputs, begin, end, [](A a, A b) { return multiply(a, b); }, same);
    // A NaN on either side stays.
    case ncclMax:
      return reduce_pieces<T>(inputs, outputs, begin, end, [](A a, A b) { return a > b || a != a ? a : b; }, same);
    case ncclMin:
      return reduce_pieces<T>(inputs, outputs, begin, end, [](A a, A b) { return a < b || a != a ? a : b; }, same);
    default:
      return;
  }
}

}  // namespace

void reduce(ncclDataType_t type, ncclRedOp_t reduction, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
            std::size_t begin, std::size_t end) {
  const auto as = [&]<class T>(T) { reduce_as<T>(reduction, inputs, outputs, begin, end); };
  switch (type) {
    case ncclInt8:
      return as(std::int8_t{});
    case ncclUint8:
      return as(std::uint8_t{});
    case ncclInt32:
      return as(std::int32_t{});
    case ncclUint32:
      return as(std::uint32_t{});
    case ncclInt64:
      return as(std::int64_t{});
    case ncclUint64:
      return as(std::uint64_t{});
    case ncclFloat16:
      return as(__half{});
    case ncclFloat32:
      return as(float{});
    case ncclFloat64:
      return as(double{});
    case ncclBfloat16:
      return as(__nv_bfloat16{});
    case ncclFloat8e4m3:
      return as(E4M3{});
    case ncclFloat8e5m2:
      return as(E5M2{});
    default:
      return;
  }
}

}  // namespace hostweave::cpu
