#include "hostweave/range.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace hw {

Range::Range(const char* name) { nvtxRangePushA(name); }

Range::~Range() { nvtxRangePop(); }

}  // namespace hw
#else  // without NVTX; `hostweave doctor` reports that

namespace hw {

Range::Range(const char*) {}

Range::~Range() {}

}  // namespace hw
#endif
