// HW_CHECK of the fake runtime.
#pragma once
#include <string>

#include "hostweave/errors.h"

#define HW_CHECK(call) ((call) == cudaSuccess ? void() : throw hw::ExecutionError(#call))
