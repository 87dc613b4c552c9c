#include "history.h"

#include <algorithm>

namespace hostweave::cpu {

std::optional<History::Conflict> History::note(const Ranges& ranges, const Access& access, const Clock& clock) {
  std::optional<Conflict> first;
  for (const Range& range : ranges) {
    if (range.empty()) continue;
    const bool contiguous = range.rows == 1 || range.pitch == range.bytes;
    const std::size_t pieces = contiguous ? 1 : range.rows;
    const std::size_t bytes = contiguous ? range.rows * range.bytes : range.bytes;
    for (std::size_t row = 0; row < pieces; ++row) {
      const std::uintptr_t begin = range.begin + row * range.pitch;
      auto conflict = note_piece(begin, begin + bytes, range.write, access, clock);
      if (conflict && !first) first = std::move(conflict), first->range = range;
    }
  }
  return first;
}

// Splits the segment that contains `address`. Returns the first segment that begins at or after this address.
History::Segments::iterator History::split_at(std::uintptr_t address) {
  auto next = segments_.lower_bound(address);
  if (next == segments_.begin()) return next;
  auto before = std::prev(next);
  if (before->second.end <= address) return next;
  Segment tail = before->second;
  before->second.end = address;
  return segments_.emplace_hint(next, address, std::move(tail));
}

std::optional<History::Conflict> History::note_piece(std::uintptr_t begin, std::uintptr_t end, bool write, const Access& access,
                                                     const Clock& clock) {
  std::optional<Conflict> found;
  const auto unknown = [&](const Access& earlier) {
    return earlier.actor != access.actor && clock.at(earlier.actor) < earlier.epoch;
  };
  auto it = split_at(begin);
  split_at(end);
  while (begin < end) {
    if (it == segments_.end() || it->first >= end) {
      it = segments_.emplace_hint(it, begin, Segment{end, {}, {}});
    } else if (it->first > begin) {
      it = segments_.emplace_hint(it, begin, Segment{it->first, {}, {}});
    }
    Segment& segment = it->second;
    if (!found && segment.write && unknown(*segment.write)) found = Conflict{*segment.write, true, {}};
    if (write) {
      for (const Access& read : segment.reads) {
        if (!found && unknown(read)) found = Conflict{read, false, {}};
      }
      segment.write = access;
      segment.reads.clear();
    } else {
      const auto same = std::ranges::find(segment.reads, access.actor, &Access::actor);
      if (same == segment.reads.end()) {
        segment.reads.push_back(access);
      } else {
        *same = access;
      }
    }
    begin = segment.end;
    ++it;
  }
  // A write merges the segments that it covers, so that the number of segments stays bounded.
  if (write) {
    auto last = std::prev(it);
    auto first = last;
    while (first != segments_.begin() && std::prev(first)->second.end == first->first && std::prev(first)->second.reads.empty() &&
           std::prev(first)->second.write && std::prev(first)->second.write->actor == access.actor &&
           std::prev(first)->second.write->epoch == access.epoch) {
      --first;
    }
    if (first != last) {
      first->second.end = last->second.end;
      segments_.erase(std::next(first), std::next(last));
    }
  }
  return found;
}

void History::forget(std::uintptr_t begin, std::uintptr_t end) {
  if (begin >= end) return;
  split_at(begin);
  const auto last = split_at(end);
  segments_.erase(segments_.lower_bound(begin), last);
}

}  // namespace hostweave::cpu
