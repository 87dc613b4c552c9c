// What happens when all ranks of a collective have come: the data moves.
#include <algorithm>
#include <cstring>

#include "machine.h"
#include "reduce.h"
#include "types.h"

namespace hostweave::cpu {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;  // worth waking another worker for

void move(void* to, const void* from, std::size_t bytes) {
  if (to == from || bytes == 0) return;
  const std::size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  Machine::get().split(pieces, [=](std::size_t piece) {
    const std::size_t at = piece * kPieceBytes;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, std::min(kPieceBytes, bytes - at));
  });
}

void reduce_all(const Match& match, const std::vector<const void*>& inputs, const std::vector<void*>& outputs) {
  const std::size_t piece_size = kPieceBytes / type_size(match.type);
  const std::size_t pieces = (match.count + piece_size - 1) / piece_size;
  Machine::get().split(pieces, [&](std::size_t piece) {
    const std::size_t begin = piece * piece_size;
    reduce(match.type, match.reduction, inputs, outputs, begin, std::min(begin + piece_size, match.count));
  });
}

const char* at(const void* base, std::size_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }

}  // namespace

void Match::exchange() {
  const std::size_t bytes = count * type_size(type);
  if (bytes == 0) return;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const Seat& seat : seats) {
    inputs.push_back(seat.send);
    outputs.push_back(seat.recv);
  }
  switch (kind) {
    case CommKind::send_recv:
      return move(seats[1].recv, buffered ? buffer.data() : seats[0].send, bytes);
    case CommKind::broadcast:
      for (void* output : outputs) move(output, seats[root].send, bytes);
      return;
    case CommKind::all_gather:
      for (std::size_t from = 0; from < seats.size(); ++from) {
        for (void* output : outputs) move(at(output, from * bytes), inputs[from], bytes);
      }
      return;
    case CommKind::all_reduce:
      return reduce_all(*this, inputs, outputs);
    case CommKind::reduce:
      return reduce_all(*this, inputs, {seats[root].recv});
    case CommKind::reduce_scatter:
      for (std::size_t to = 0; to < seats.size(); ++to) {
        std::vector<const void*> blocks;
        for (const void* input : inputs) blocks.push_back(at(input, to * bytes));
        reduce_all(*this, blocks, {outputs[to]});
      }
      return;
  }
}

}  // namespace hostweave::cpu
