// Helpers that implement a program's C API on its C++ API.
#pragma once
#include "hostweave/hostweave.h"
#include "hostweave/tensor.h"
#include "hostweave/world.h"

struct hw_world {
  hw::World world;
};

namespace hw::c {

// Calls `work`. Converts exceptions to a status, and to the text of hw_last_error.
hw_status guarded(void (*work)(void* closure), void* closure);

template <class Work>
hw_status guarded(Work work) {
  return guarded([](void* closure) { (*static_cast<Work*>(closure))(); }, &work);
}

// Throws ArgumentError if the pointer `name` is null.
void expect_pointer(const void* pointer, const char* name);

template <class T>
T& at(T* pointer, const char* name) {
  expect_pointer(pointer, name);
  return *pointer;
}

Tensor tensor(const hw_tensor& given);
hw_shape shape(const Shape& given);

}  // namespace hw::c
