#include "hostweave/straighten.h"

namespace hw {

void prepare_to_straighten() {}

LaunchEvents straighten(cudaGraph_t&, cudaStream_t) { return {}; }

}  // namespace hw
