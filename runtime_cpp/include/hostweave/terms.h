// What the ranks of a channel add up inside of the kernel that uses it: each rank has a term in its own memory. To a kernel the
// sum is an array, as hw::load(terms + i) and terms[i] of it say, in the order of ranks, so that all ranks round alike.
//
// Where GPUs reach each other's memory a kernel sends its term to the others in packets, which hold four bytes beside the number
// of the exchange: who waits for an element sees by itself that it is there, and no flag follows (NCCL's protocol LL). Packets
// land in one of two slots by turns. That is enough: when a rank sends for the second time into a slot it has received from each
// peer in the exchange between, and what a peer sends there it sends after its kernel before, which read the slot, has ended.
#pragma once
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/index.h"

namespace hw {

constexpr int kExchangeRanks = 8;                            // at most
constexpr int64_t kExchangeBytes = int64_t{512} << 10;       // of a term, at most
constexpr int64_t kPacketBytes = 8;                          // of a term, in one packet
constexpr int64_t kPackets = kExchangeBytes / kPacketBytes;  // of a rank, in one slot
constexpr int64_t kExchangeBlocks = 128;  // at most, so that all run at once: they wait for those of other ranks

template <class T, int kCount>
struct Values;  // of kernel.h, which host programs need not read
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first);

struct alignas(16) Packet {
  uint32_t first, number, second, number_too;
};

// A channel as the kernels of one of its ranks see it.
struct Exchange {
  Packet* landing[kExchangeRanks];  // of each rank, two slots with kPackets of each rank
  uint32_t* state;                  // the number of the last exchange, and how many blocks are done with this one
  const uint32_t* aborted;          // not 0: nobody is to wait any more
  int rank;
};

template <class T, int kRanks>
struct TermsAt;

// The argument of a kernel, that begins with begin() and ends with end().
template <class T, int kRanks>
struct Terms {
  const T* own;
  int64_t count;
  const T* gathered;  // all terms, one after another, where they do not travel in packets
  Exchange exchange;
  uint32_t number;  // of this exchange

  HW_DEVICE TermsAt<T, kRanks> operator+(int64_t first) const { return {*this, first}; }
  HW_DEVICE T operator[](int64_t i) const { return (*this + i).element(); }
  template <int kCount>
  HW_DEVICE auto load() const {
    return (*this + 0).template load<kCount>();
  }

#ifdef __CUDACC__
  static constexpr int kPart = kPacketBytes / sizeof(T);  // elements of a packet

  HW_DEVICE int64_t slot_of(int rank) const { return (int64_t{number % 2} * kRanks + rank) * kPackets; }

  // Sends this rank's term.
  HW_DEVICE void begin() {
    if (gathered) return;
    number = *static_cast<volatile uint32_t*>(exchange.state) + 1;
    const int64_t step = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i * kPart < count; i += step) {
      uint32_t words[2] = {};
      if ((i + 1) * kPart <= count && reinterpret_cast<uintptr_t>(own) % kPacketBytes == 0) {
        const uint2 both = *reinterpret_cast<const uint2*>(own + i * kPart);
        words[0] = both.x, words[1] = both.y;
      } else {
        for (int e = 0; e < kPart && i * kPart + e < count; ++e) reinterpret_cast<T*>(words)[e] = own[i * kPart + e];
      }
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == exchange.rank) continue;
        asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(exchange.landing[peer] + slot_of(exchange.rank) + i),
                     "r"(words[0]), "r"(number), "r"(words[1]), "r"(number)
                     : "memory");
      }
    }
  }

  // Counts the exchange, when all blocks have what they waited for.
  HW_DEVICE void end() const {
    if (gathered) return;
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(exchange.state + 1, gridDim.x - 1) == gridDim.x - 1) *exchange.state = number;
  }

  // Some packets of the others, from this one on. Those of this rank are left as they are.
  template <int kMany>
  HW_DEVICE void receive(int64_t from, Packet (&packets)[kRanks][kMany]) const {
    for (uint32_t waited = 1;; ++waited) {
      bool arrived = true;
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == exchange.rank) continue;
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
          Packet& packet = packets[peer][i];
          asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(packet.first), "=r"(packet.number), "=r"(packet.second), "=r"(packet.number_too)
                       : "l"(exchange.landing[exchange.rank] + slot_of(peer) + from + i)
                       : "memory");
        }
      }
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == exchange.rank) continue;
#pragma unroll
        for (int i = 0; i < kMany; ++i) arrived &= packets[peer][i].number == number && packets[peer][i].number_too == number;
      }
      if (arrived || (waited % 1024 == 0 && *static_cast<const volatile uint32_t*>(exchange.aborted))) return;
    }
  }
#else
  HW_DEVICE void begin() {}
  HW_DEVICE void end() const {}
#endif
};

// The sums from an element on.
template <class T, int kRanks>
struct TermsAt {
  const Terms<T, kRanks>& terms;
  int64_t first;

  HW_DEVICE TermsAt operator+(int64_t further) const { return {terms, first + further}; }

  // Not inlined, as kernels that read one by one do so in many places.
  HW_NOINLINE T element() const { return sum_of<1>()[0]; }

  template <int kCount>
  HW_DEVICE Values<T, kCount> load() const {
    if constexpr (kCount == 1) {
      return {element()};
    } else {
      return sum_of<kCount>();
    }
  }

 private:
  template <int kCount>
  HW_DEVICE Values<T, kCount> sum_of() const {
    Values<T, kCount> each[kRanks];
#ifdef __CUDACC__
    if (!terms.gathered) {
      receive(each);
      return sum(each);
    }
#endif
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) each[rank][e] = terms.gathered[rank * terms.count + first + e];
    }
    return sum(each);
  }

  template <int kCount>
  static HW_DEVICE Values<T, kCount> sum(const Values<T, kCount> (&each)[kRanks]) {
    Values<T, kCount> sums;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      auto total = static_cast<float>(each[0][e]);
#pragma unroll
      for (int rank = 1; rank < kRanks; ++rank) total += static_cast<float>(each[rank][e]);
      sums[e] = T(total);
    }
    return sums;
  }

#ifdef __CUDACC__
  // Elements that are loaded together fill packets, or are a part of one.
  template <int kCount>
  HW_DEVICE void receive(Values<T, kCount> (&each)[kRanks]) const {
    constexpr int kPart = Terms<T, kRanks>::kPart, kMany = kCount > kPart ? kCount / kPart : 1;
    static_assert(kMany * kPart == kCount || kPart % kCount == 0);
    Packet packets[kRanks][kMany];
    terms.template receive<kMany>(first / kPart, packets);
    const int within = kCount < kPart ? static_cast<int>(first % kPart) : 0;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == terms.exchange.rank) {
        each[rank] = hw::load<kCount>(terms.own + first);
        continue;
      }
      uint32_t words[2 * kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) words[2 * i] = packets[rank][i].first, words[2 * i + 1] = packets[rank][i].second;
#pragma unroll
      for (int e = 0; e < kCount; ++e) each[rank][e] = reinterpret_cast<const T*>(words)[within + e];
    }
  }
#endif
};

// Whether what a kernel reads of it may be read 16 bytes at once.
template <class T, int kRanks>
HW_DEVICE const void* place_of(const Terms<T, kRanks>& terms) {
  return terms.own;
}

}  // namespace hw
