// History of memory accesses, for race detection: the last write of each byte range, and the reads since that write.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "op.h"

namespace hostweave::cpu {

class History {
 public:
  struct Access {
    std::size_t actor;
    std::uint32_t epoch;
    OpName name;
  };
  struct Conflict {
    Access earlier;
    bool earlier_writes;
    Range range;
  };

  // Records the accesses of an op that starts with `clock`. Returns the first earlier access that conflicts
  // and does not happen before the op.
  std::optional<Conflict> note(const Ranges& ranges, const Access& access, const Clock& clock);
  void forget(std::uintptr_t begin, std::uintptr_t end);
  void clear() { segments_.clear(); }

 private:
  struct Segment {
    std::uintptr_t end;
    std::optional<Access> write;
    std::vector<Access> reads;  // reads since that write, at most one per actor
  };
  using Segments = std::map<std::uintptr_t, Segment>;

  Segments::iterator split_at(std::uintptr_t address);
  std::optional<Conflict> note_piece(std::uintptr_t begin, std::uintptr_t end, bool write, const Access& access,
                                     const Clock& clock);
  Segments segments_;
};

}  // namespace hostweave::cpu
