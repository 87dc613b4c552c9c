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

template <class T, int kCount>
struct Values;  // of kernel.h, which host programs need not read
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first);
HW_DEVICE void griddep_launch();

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

// The argument of a kernel, that begins with begin().
template <class T, int kRanks>
struct Terms {
  const T* own;
  int64_t count;
  const T* gathered;  // all terms, one after another, where they do not travel in packets
  Exchange exchange;
  uint32_t number;  // of this exchange

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
  static constexpr int kPart = kPacketBytes / sizeof(T);  // elements of a packet

  HW_DEVICE int64_t slot_of(int rank) const { return (int64_t{number % 2} * kRanks + rank) * kPackets; }

  // Sends this rank's term, and counts the exchange when all blocks know its number. Loads come before stores, as each takes its
  // time.
  HW_DEVICE void begin() {
    if (gathered) return;
    number = *static_cast<volatile uint32_t*>(exchange.state) + 1;
    const int64_t step = int64_t{gridDim.x} * blockDim.x;
    constexpr int kAtOnce = 8;
    for (int64_t from = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; from * kPart < count; from += kAtOnce * step) {
      uint2 parts[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if ((from + n * step) * kPart < count) parts[n] = part(from + n * step);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if ((from + n * step) * kPart >= count) break;
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

  // What a packet holds, with zeros past the end.
  HW_DEVICE uint2 part(int64_t i) const {
    if ((i + 1) * kPart <= count && reinterpret_cast<uintptr_t>(own) % kPacketBytes == 0) {
      return *reinterpret_cast<const uint2*>(own + i * kPart);
    }
    uint2 last{};
    for (int e = 0; e < kPart && i * kPart + e < count; ++e) reinterpret_cast<T*>(&last)[e] = own[i * kPart + e];
    return last;
  }

  // Loads some packets of the others, from this one on, which may be there or not. Those of this rank are left as they are.
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

  // Loads them again until they are there.
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

// Some sums that have been asked for: others can be asked for before these are waited for.
template <class T, int kRanks, int kCount>
struct RequestedTerms;

// The sums from an element on.
template <class T, int kRanks>
struct TermsAt {
  const Terms<T, kRanks>* terms;
  int64_t first;

  HW_DEVICE TermsAt operator+(int64_t further) const { return {terms, first + further}; }

  // Not inlined, as kernels that read one by one do so in many places.
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
  // Elements that are loaded together fill packets, or are a part of one.
  static constexpr int kPart = Terms<T, kRanks>::kPart, kMany = kCount > kPart ? kCount / kPart : 1;
  static_assert(kMany * kPart == kCount || kPart % kCount == 0);
  Packet packets[kRanks][kMany];

  HW_DEVICE void ask(const TermsAt<T, kRanks>& place) {
    at = place;
    if (!at.terms->gathered) at.terms->look(at.first / kPart, packets);
  }
#else
  HW_DEVICE void ask(const TermsAt<T, kRanks>& place) { at = place; }
#endif

  // Their sums, when they are there.
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
    const Values<T, kCount> own = hw::load<kCount>(at.terms->own + at.first);
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

// Whether what a kernel reads of it may be read 16 bytes at once.
template <class T, int kRanks>
HW_DEVICE const void* place_of(const Terms<T, kRanks>& terms) {
  return terms.own;
}

}  // namespace hw
