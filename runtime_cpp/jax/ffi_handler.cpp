// XLA custom call through which JAX calls programs. Passes array addresses and XLA's stream to Python.
#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Returns 0, or 1 with an error message in `problem`.
using Call = int (*)(int64_t key, void* const* arrays, void* stream, char* problem, int64_t bytes);
Call call = nullptr;

ffi::Error run(void* stream, ffi::RemainingArgs inputs, ffi::RemainingRets outputs, int64_t key) {
  std::vector<void*> arrays;
  for (size_t i = 0; i < inputs.size(); ++i) arrays.push_back(inputs.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < outputs.size(); ++i) arrays.push_back((*outputs.get<ffi::AnyBuffer>(i))->untyped_data());
  std::vector<char> problem(1 << 14);
  if (call(key, arrays.data(), stream, problem.data(), static_cast<int64_t>(problem.size())) == 0) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, problem.data());
}

ffi::Error run_cpu(ffi::RemainingArgs inputs, ffi::RemainingRets outputs, int64_t key) {
  return run(nullptr, inputs, outputs, key);
}

}  // namespace

extern "C" void hostweave_jax_calls(Call of_python) { call = of_python; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(hostweave_jax_cpu, run_cpu, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("key"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hostweave_jax_cuda, run,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets().Attr<int64_t>("key"));
