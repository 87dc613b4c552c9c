#include "types.h"

#include <algorithm>
#include <cmath>

namespace hostweave::cpu {

std::size_t type_size(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

std::size_t type_size(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_64F:
      return 8;
    default:
      return 0;
  }
}

const char* type_name(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return "i8";
    case ncclUint8:
      return "u8";
    case ncclInt32:
      return "i32";
    case ncclUint32:
      return "u32";
    case ncclInt64:
      return "i64";
    case ncclUint64:
      return "u64";
    case ncclFloat16:
      return "f16";
    case ncclFloat32:
      return "f32";
    case ncclFloat64:
      return "f64";
    case ncclBfloat16:
      return "bf16";
    case ncclFloat8e4m3:
      return "f8e4m3";
    case ncclFloat8e5m2:
      return "f8e5m2";
    default:
      return "an unknown type";
  }
}

namespace {

struct Format {
  int mantissa_bits, bias;
  float largest;
  std::uint8_t nan;
};
constexpr Format kE4M3{3, 7, 448.0f, 0x7f};
constexpr Format kE5M2{2, 15, 57344.0f, 0x7f};

float decode(std::uint8_t bits, const Format& format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7f) >> format.mantissa_bits;
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - format.bias - format.mantissa_bits);
  return sign *
         std::ldexp(static_cast<float>(mantissa + (1 << format.mantissa_bits)), exponent - format.bias - format.mantissa_bits);
}

std::uint8_t encode(float value, const Format& format) {
  if (std::isnan(value)) return format.nan;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The spacing of the format at this magnitude; nearbyint rounds to even.
  const int unit = std::max(exponent - 1, 1 - format.bias) - format.mantissa_bits;
  float rounded = std::ldexp(std::nearbyint(std::ldexp(std::fmin(magnitude, 2 * format.largest), -unit)), unit);
  rounded = std::fmin(rounded, format.largest);
  if (rounded == 0) return sign;
  std::frexp(rounded, &exponent);
  const int biased = std::max(exponent - 1 + format.bias, 0);
  if (biased == 0) return sign | static_cast<std::uint8_t>(std::ldexp(rounded, format.bias - 1 + format.mantissa_bits));
  const int mantissa = static_cast<int>(std::ldexp(rounded, format.mantissa_bits - (exponent - 1)));
  return sign | static_cast<std::uint8_t>(biased << format.mantissa_bits | (mantissa & ((1 << format.mantissa_bits) - 1)));
}

}  // namespace

float decode_e4m3(std::uint8_t bits) { return (bits & 0x7f) == 0x7f ? std::nanf("") : decode(bits, kE4M3); }
float decode_e5m2(std::uint8_t bits) {
  if ((bits & 0x7f) > 0x7c) return std::nanf("");
  if ((bits & 0x7f) == 0x7c) return bits & 0x80 ? -INFINITY : INFINITY;
  return decode(bits, kE5M2);
}
std::uint8_t encode_e4m3(float value) { return encode(value, kE4M3); }
std::uint8_t encode_e5m2(float value) { return encode(value, kE5M2); }

}  // namespace hostweave::cpu
