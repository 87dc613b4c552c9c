#include "hostweave/few_rows_plan.h"

namespace hw {

const FewRowsKernels* few_rows_kernels(cudaDataType_t, cudaDataType_t) { return nullptr; }

}  // namespace hw
