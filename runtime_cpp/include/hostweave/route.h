// How the blocks of a tensor get from one mesh to another.
#pragma once
#include <cstdint>

namespace hw {

// Block `sent` of what rank `sender` holds becomes block `received` of what rank `receiver` holds.
struct Route {
  int sender;
  int64_t sent;
  int receiver;
  int64_t received;
};

}  // namespace hw
