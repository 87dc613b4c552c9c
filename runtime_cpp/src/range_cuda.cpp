#include "hostweave/range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else  // without NVTX; `hostweave doctor` reports that
#define nvtxRangePushA(name) static_cast<void>(name)
#define nvtxRangePop()
#endif

namespace hw {

Range::Range(const char* name) { nvtxRangePushA(name); }

Range::~Range() { nvtxRangePop(); }

}  // namespace hw
