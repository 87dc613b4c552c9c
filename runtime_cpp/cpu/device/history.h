// Which op touched which bytes last, to find accesses that nothing orders.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "op.h"

namespace hostweave::cpu {

class History {
 public:
  struct Access {
    std::size_t lane;
    std::uint32_t epoch;
    OpName name;
  };
  struct Conflict {
    Access earlier;
    bool earlier_writes;
    Range range;
  };

  // Notes the accesses of an op whose beginning knows `clock`, and returns the first earlier access that it conflicts
  // with and does not know of.
  std::optional<Conflict> note(const Ranges& ranges, const Access& access, const Clock& clock);
  void forget(std::uintptr_t begin, std::uintptr_t end);
  void clear() { segments_.clear(); }

 private:
  struct Segment {
    std::uintptr_t end;
    std::optional<Access> write;
    std::vector<Access> reads;  // since that write, one for a lane
  };
  using Segments = std::map<std::uintptr_t, Segment>;

  Segments::iterator split_at(std::uintptr_t address);
  std::optional<Conflict> note_piece(std::uintptr_t begin, std::uintptr_t end, bool write, const Access& access,
                                     const Clock& clock);
  Segments segments_;
};

}  // namespace hostweave::cpu
