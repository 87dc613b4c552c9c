// All-reduce inside the kernel that consumes the sum. Each rank has a term in its own memory. To a kernel the sum is an array,
// accessed by hw::load(terms + i) and terms[i]. Terms are added in rank order, so all ranks round equally.
//
// With peer access, a kernel sends its term to the others in packets of four bytes of data and the number of the exchange. A
// reader detects arrival from the packet itself, without a separate flag (NCCL's LL protocol). Packets land alternately in two
// slots. Two slots suffice: before a rank reuses a slot, it has received packets of the next exchange from every peer. A peer
// sends these only after its previous kernel, which read the slot, has ended.
#pragma once
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/index.h"

namespace hw {

constexpr int kExchangeRanks = 8;                            // maximum
constexpr int64_t kExchangeBytes = int64_t{512} << 10;       // maximum bytes of a term
constexpr int64_t kPacketBytes = 8;                          // bytes of a term per packet
constexpr int64_t kPackets = kExchangeBytes / kPacketBytes;  // packets per rank and slot

template <class T, int kCount>
struct Values;  // defined in kernel.h, which host programs do not include
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first);
HW_DEVICE void griddep_launch();

struct alignas(16) Packet {
  uint32_t first, number, second, number_too;
};

// A channel, seen from the kernels of one of its ranks.
struct Exchange {
  Packet* landing[kExchangeRanks];  // per rank: two slots with kPackets packets from each rank
  uint32_t* state;                  // number of the last exchange, and count of blocks that are done with this one
  const uint32_t* aborted;          // nonzero ends all waits
  int rank;
};

template <class T, int kRanks>
struct TermsAt;

// Kernel argument. The kernel first calls begin().
template <class T, int kRanks>
struct Terms {
  const T* own;
  int64_t count;
  const T* gathered;  // consecutive terms of all ranks, if they are not exchanged in packets
  Exchange exchange;
  uint32_t number;  // number of this exchange

  HW_DEVICE TermsAt<T, kRanks> operator+(int64_t first) const { return {this, first}; }
  HW_DEVICE T operator[](int64_t i) const { return (*this + i).element(); }
  template <int kCount>
  HW_DEVICE auto load() const {
    return (*this + 0).template load<kCount>();
  }
  template <int kCount>
  HW_DEVICE auto request() const {
    return (*this + 0).template request<kCount>();
  }

#ifdef __CUDACC__
  static constexpr int kPart = kPacketBytes / sizeof(T);  // elements per packet

  HW_DEVICE int64_t slot_of(int rank) const { return (int64_t{number % 2} * kRanks + rank) * kPackets; }

  // Sends this rank's term, and increments the exchange number when all blocks have read it. Loads are issued before stores to
  // overlap their latencies. A block sends adjacent packets: if rows are divided evenly, those of the rows that it reads later.
  HW_DEVICE void begin() {
    if (gathered) return;
    number = *static_cast<volatile uint32_t*>(exchange.state) + 1;
    const int64_t all = (count + kPart - 1) / kPart, each = (all + gridDim.x - 1) / gridDim.x, step = blockDim.x;
    const int64_t end = (blockIdx.x + 1) * each < all ? (blockIdx.x + 1) * each : all;
    constexpr int kAtOnce = 8;
    for (int64_t from = blockIdx.x * each + threadIdx.x; from < end; from += kAtOnce * step) {
      uint2 parts[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (from + n * step < end) parts[n] = part(from + n * step);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (from + n * step >= end) break;
#pragma unroll
        for (int peer = 0; peer < kRanks; ++peer) {
          if (peer == exchange.rank) continue;
          asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(exchange.landing[peer] + slot_of(exchange.rank) +
                                                                              from + n * step),
                       "r"(parts[n].x), "r"(number), "r"(parts[n].y), "r"(number)
                       : "memory");
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(exchange.state + 1, gridDim.x - 1) == gridDim.x - 1) *exchange.state = number;
    griddep_launch();
  }

  // Data of a packet, zero-padded.
  HW_DEVICE uint2 part(int64_t i) const {
    if ((i + 1) * kPart <= count && reinterpret_cast<uintptr_t>(own) % kPacketBytes == 0) {
      return *reinterpret_cast<const uint2*>(own + i * kPart);
    }
    uint2 last{};
    for (int e = 0; e < kPart && i * kPart + e < count; ++e) reinterpret_cast<T*>(&last)[e] = own[i * kPart + e];
    return last;
  }

  // Loads packets of the other ranks, which may not have arrived yet. Packets of this rank are not changed.
  template <int kMany>
  HW_DEVICE void look(int64_t from, Packet (&packets)[kRanks][kMany]) const {
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
  }

  // Polls until the packets have arrived.
  template <int kMany>
  HW_DEVICE void wait(int64_t from, Packet (&packets)[kRanks][kMany]) const {
    for (uint32_t waited = 1; !is_there(packets); ++waited) {
      if (waited % 1024 == 0 && *static_cast<const volatile uint32_t*>(exchange.aborted)) return;
      look(from, packets);
    }
  }

  template <int kMany>
  HW_DEVICE bool is_there(const Packet (&packets)[kRanks][kMany]) const {
    bool all = true;
#pragma unroll
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer == exchange.rank) continue;
#pragma unroll
      for (int i = 0; i < kMany; ++i) all &= packets[peer][i].number == number && packets[peer][i].number_too == number;
    }
    return all;
  }
#else
  HW_DEVICE void begin() {}
#endif
};

// Requested sums. More can be requested before waiting for these.
template <class T, int kRanks, int kCount>
struct RequestedTerms;

// Pointer-like position in the sums.
template <class T, int kRanks>
struct TermsAt {
  const Terms<T, kRanks>* terms;
  int64_t first;

  HW_DEVICE TermsAt operator+(int64_t further) const { return {terms, first + further}; }

  // Not inlined, because kernels with scalar access call it in many places.
  HW_NOINLINE T element() const { return requested<1>().received()[0]; }

  template <int kCount>
  HW_DEVICE Values<T, kCount> load() const {
    if constexpr (kCount == 1) {
      return {element()};
    } else {
      return requested<kCount>().received();
    }
  }

  template <int kCount>
  HW_DEVICE auto request() const {
    if constexpr (kCount == 1) {
      return load<1>();
    } else {
      return requested<kCount>();
    }
  }

 private:
  template <int kCount>
  HW_DEVICE RequestedTerms<T, kRanks, kCount> requested() const {
    RequestedTerms<T, kRanks, kCount> made;
    made.ask(*this);
    return made;
  }
};

template <class T, int kRanks, int kCount>
struct RequestedTerms {
  TermsAt<T, kRanks> at;

#ifdef __CUDACC__
  // A vector covers whole packets, or is part of one packet.
  static constexpr int kPart = Terms<T, kRanks>::kPart, kMany = kCount > kPart ? kCount / kPart : 1;
  static_assert(kMany * kPart == kCount || kPart % kCount == 0);
  Packet packets[kRanks][kMany];
  Values<T, kCount> own;

  HW_DEVICE void ask(const TermsAt<T, kRanks>& place) {
    at = place;
    if (at.terms->gathered) return;
    own = hw::load<kCount>(at.terms->own + at.first);
    at.terms->look(at.first / kPart, packets);
  }
#else
  HW_DEVICE void ask(const TermsAt<T, kRanks>& place) { at = place; }
#endif

  // Waits for the sums.
  HW_DEVICE Values<T, kCount> received() {
    const Terms<T, kRanks>& terms = *at.terms;
    Values<T, kCount> each[kRanks];
#ifdef __CUDACC__
    if (!terms.gathered) {
      take(each);
      return sum(each);
    }
#endif
    HW_UNROLL
    for (int rank = 0; rank < kRanks; ++rank) {
      HW_UNROLL
      for (int e = 0; e < kCount; ++e) each[rank][e] = terms.gathered[rank * terms.count + at.first + e];
    }
    return sum(each);
  }

 private:
#ifdef __CUDACC__
  HW_DEVICE void take(Values<T, kCount> (&each)[kRanks]) {
    at.terms->wait(at.first / kPart, packets);
    const int within = kCount < kPart ? static_cast<int>(at.first % kPart) : 0;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      uint32_t words[2 * kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) words[2 * i] = packets[rank][i].first, words[2 * i + 1] = packets[rank][i].second;
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        each[rank][e] = rank == at.terms->exchange.rank ? own[e] : reinterpret_cast<const T*>(words)[within + e];
    }
  }
#endif

  static HW_DEVICE Values<T, kCount> sum(const Values<T, kCount> (&each)[kRanks]) {
    Values<T, kCount> sums;
    HW_UNROLL
    for (int e = 0; e < kCount; ++e) {
      auto total = static_cast<float>(each[0][e]);
      HW_UNROLL
      for (int rank = 1; rank < kRanks; ++rank) total += static_cast<float>(each[rank][e]);
      sums[e] = T(total);
    }
    return sums;
  }
};

// Address that determines if vector access is possible.
template <class T, int kRanks>
HW_DEVICE const void* place_of(const Terms<T, kRanks>& terms) {
  return terms.own;
}

}  // namespace hw
