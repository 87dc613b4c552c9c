// Collectives that run inside the kernel that uses their result: all-reduce, reduce-scatter and all-gather. The kernel reads the
// result like an array, by hw::load(terms + i) and terms[i]. The terms are added in rank order, so all ranks
// get the same sum.
//
// With peer access, an all-reduce (hw::Terms) sends the term of its rank to the peers in packets. A packet has eight bytes of
// data; the number of the exchange follows each half. So the packet itself shows its arrival, without a separate flag (NCCL's LL
// protocol). A reduce-scatter or all-gather (hw::LandedBlocks) stores blocks in the memory of the peers. Then the kernel
// sets flags in this memory to the number of the exchange.
//
// Exchanges use two slots of memory alternately, so that a rank does not overwrite data that a peer still reads. A rank writes to
// slot 0 again only after all peers have sent data through slot 1. A peer sends these data only after the peer has read slot 0.
#pragma once
#include <cstdint>

#include "hostweave/device.h"
#include "hostweave/index.h"

namespace hw {

constexpr int kExchangeRanks = 8;                            // maximum number of ranks
constexpr int64_t kExchangeBytes = int64_t{512} << 10;       // maximum bytes of a term
constexpr int64_t kPacketBytes = 8;                          // bytes of a term per packet
constexpr int64_t kPackets = kExchangeBytes / kPacketBytes;  // packets per rank and slot
constexpr int64_t kBlockBytes = int64_t{8} << 20;            // maximum bytes of the blocks of all ranks
constexpr int64_t kPartBytes = 1024;                         // minimum average bytes per part, if a block has several parts
constexpr int kParts = 256;                                  // maximum number of parts of a block; each part has a flag

template <class T, int kCount>
struct Values;  // defined in kernel.h, which host programs do not include
template <int kCount, class T>
HW_DEVICE Values<T, kCount> load(const T* first);
HW_DEVICE void griddep_launch();

struct alignas(16) Packet {
  uint32_t first, number, second, number_too;
};

// Memory that the kernels of one rank use for exchanges over a channel.
struct Exchange {
  // Memory of each rank: two slots with kPackets packets from each rank, then slots and flags of LandedBlocks.
  Packet* landing[kExchangeRanks];
  uint32_t* state;  // [0]: number of the last exchange; [1]: thread blocks that have sent their data of the current exchange
  const uint32_t* aborted;  // a nonzero value ends all waits
  int rank;
};

// Returns vector `i` of an array of `count` elements. Elements after the end of the array are zero.
template <class Vector, class T>
HW_DEVICE Vector padded(const T* elements, int64_t count, int64_t i) {
  constexpr int kEach = sizeof(Vector) / sizeof(T);
  if ((i + 1) * kEach <= count && reinterpret_cast<uintptr_t>(elements) % sizeof(Vector) == 0) {
    return reinterpret_cast<const Vector*>(elements)[i];
  }
  Vector last{};
  for (int e = 0; e < kEach && i * kEach + e < count; ++e) reinterpret_cast<T*>(&last)[e] = elements[i * kEach + e];
  return last;
}

// Sums of the terms of all ranks, in rank order.
template <class T, int kRanks, int kCount>
HW_DEVICE Values<T, kCount> summed(const Values<T, kCount> (&terms)[kRanks]) {
  Values<T, kCount> sums;
  HW_UNROLL
  for (int e = 0; e < kCount; ++e) {
    auto total = static_cast<float>(terms[0][e]);
    HW_UNROLL
    for (int rank = 1; rank < kRanks; ++rank) total += static_cast<float>(terms[rank][e]);
    sums[e] = T(total);
  }
  return sums;
}

template <class T, int kRanks>
struct TermsAt;

// Kernel argument for the result of an all-reduce. The kernel calls begin() before it reads the result.
template <class T, int kRanks>
struct Terms {
  using Element = T;
  static constexpr bool kScatters = false;
  static constexpr int64_t kMostBytes = kExchangeBytes;

  const T* own;
  int64_t count;
  const T* gathered;  // consecutive terms of all ranks; null if kernels exchange the terms in packets
  Exchange exchange;
  uint32_t number;  // number of this exchange

  HW_DEVICE TermsAt<T, kRanks> operator+(int64_t first) const { return {this, first}; }
  HW_DEVICE T operator[](int64_t i) const { return (*this + i).element(); }

#ifdef __CUDACC__
  static constexpr int kPart = kPacketBytes / sizeof(T);  // elements per packet

  HW_DEVICE int64_t slot_of(int rank) const { return (int64_t{number % 2} * kRanks + rank) * kPackets; }

  // Sends the term of this rank to all peers, unless NCCL has gathered the terms. The last thread block increments the exchange
  // number. A thread loads up to kAtOnce packets before it stores, so that the latencies of the loads overlap.
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
        if (from + n * step < end) parts[n] = padded<uint2>(own, count, from + n * step);
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

  // Loads the packets of the other ranks. Some of these packets may not have arrived yet. Does not change packets[exchange.rank].
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

  // Polls until the packets have arrived, or the exchange is aborted.
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

// Sums that a thread has requested. A thread can request several sums before it waits for the first.
template <class T, int kRanks, int kCount>
struct RequestedTerms;

// Pointer-like position in the sums.
template <class T, int kRanks>
struct TermsAt {
  const Terms<T, kRanks>* terms;
  int64_t first;

  HW_DEVICE TermsAt operator+(int64_t further) const { return {terms, first + further}; }

  // Not inlined, because kernels with scalar access call this function in many places.
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

  HW_DEVICE void ask(const TermsAt<T, kRanks>& terms) {
    at = terms;
    if (at.terms->gathered) return;
    own = hw::load<kCount>(at.terms->own + at.first);
    at.terms->look(at.first / kPart, packets);
  }
#else
  HW_DEVICE void ask(const TermsAt<T, kRanks>& terms) { at = terms; }
#endif

  // Returns the sums. Waits for packets that have not arrived.
  HW_DEVICE Values<T, kCount> received() {
    const Terms<T, kRanks>& terms = *at.terms;
    Values<T, kCount> each[kRanks];
#ifdef __CUDACC__
    if (!terms.gathered) {
      take(each);
      return summed(each);
    }
#endif
    HW_UNROLL
    for (int rank = 0; rank < kRanks; ++rank) {
      HW_UNROLL
      for (int e = 0; e < kCount; ++e) each[rank][e] = terms.gathered[rank * terms.count + at.first + e];
    }
    return summed(each);
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
};

// Address whose alignment decides if vector accesses are possible.
template <class T, int kRanks>
HW_DEVICE const void* address_of(const Terms<T, kRanks>& terms) {
  return terms.own;
}

template <class T, int kRanks, bool kSums>
struct LandedBlocksAt;

// Kernel argument for the result of a reduce-scatter (kSums) or all-gather. The kernel calls begin() first; begin() waits for the
// blocks of the peers.
template <class T, int kRanks, bool kSums>
struct LandedBlocks {
  using Element = T;
  static constexpr bool kScatters = kSums;
  static constexpr int64_t kMostBytes = kBlockBytes / kRanks / 16 * 16;

  const T* own;       // all-gather: the block of this rank; reduce-scatter: one block for each rank
  int64_t count;      // elements of a block
  const T* gathered;  // consecutive blocks from all ranks; null if kernels exchange the blocks
  Exchange exchange;
  uint32_t number;  // number of this exchange
  bool is_sent;     // an earlier kernel has stored the blocks in the memory of the peers; see SentBlocks

  HW_DEVICE LandedBlocksAt<T, kRanks, kSums> operator+(int64_t first) const { return {this, first}; }
  HW_DEVICE T operator[](int64_t i) const { return values<1>(i)[0]; }

  template <int kCount>
  HW_DEVICE Values<T, kCount> values(int64_t first) const {
    if constexpr (kSums) {
      Values<T, kCount> terms[kRanks];
      HW_UNROLL
      for (int rank = 0; rank < kRanks; ++rank) terms[rank] = hw::load<kCount>(from(rank) + first);
      return summed(terms);
    } else {
      int rank = 0;
      HW_UNROLL
      for (int next = 1; next < kRanks; ++next) rank += first >= next * count;
      return hw::load<kCount>(from(rank) + (first - rank * count));
    }
  }

  HW_DEVICE const T* block_for(int rank) const { return kSums ? own + rank * count : own; }

  // The block that a rank sent to this rank.
  HW_DEVICE const T* from(int rank) const {
    if (gathered) return gathered + rank * count;
    return rank == exchange.rank ? block_for(rank) : reinterpret_cast<const T*>(landing(exchange.rank, rank));
  }

  // Landing memory of a rank for the block of a sender.
  HW_DEVICE char* landing(int rank, int sender) const { return slots(rank) + number % 2 * kBlockBytes + sender * kMostBytes; }

  // Flags of a rank for the parts of a sender's block.
  HW_DEVICE uint32_t* flags(int rank, int sender) const {
    return reinterpret_cast<uint32_t*>(slots(rank) + 2 * kBlockBytes) + sender * kParts;
  }

  HW_DEVICE char* slots(int rank) const { return reinterpret_cast<char*>(exchange.landing[rank] + 2 * kRanks * kPackets); }

#ifdef __CUDACC__
  // Sends the blocks in parts, unless `is_sent`. Sets flags, and waits for all parts from the peers. Does nothing if NCCL
  // has gathered the blocks. The last thread block increments the exchange number. The number of parts depends only on the size
  // and on `is_sent`, so all ranks use the same number.
  HW_DEVICE void begin() {
    if (gathered) return;
    number = *static_cast<volatile uint32_t*>(exchange.state) + 1;
    constexpr int64_t kVector = sizeof(uint4);
    const int64_t vectors = (count * sizeof(T) + kVector - 1) / kVector, most = vectors * kVector / kPartBytes;
    const int parts = is_sent || most < 1 ? 1 : most < kParts ? most : kParts;
    const int64_t each = (vectors + parts - 1) / parts;
    for (int part = blockIdx.x; part < parts && !is_sent; part += gridDim.x) {
#pragma unroll
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer != exchange.rank) send(peer, part * each, (part + 1) * each < vectors ? (part + 1) * each : vectors);
      }
    }
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < kRanks && peer != exchange.rank) {
      __threadfence_system();
      for (int part = blockIdx.x; part < parts; part += gridDim.x) {
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flags(peer, exchange.rank) + part), "r"(number) : "memory");
      }
    }
    if (threadIdx.x == 0 && atomicInc(exchange.state + 1, gridDim.x - 1) == gridDim.x - 1) *exchange.state = number;
    griddep_launch();
    for (int i = threadIdx.x; i < kRanks * parts; i += blockDim.x) {
      if (i / parts != exchange.rank) wait(flags(exchange.rank, i / parts) + i % parts);
    }
    __syncthreads();
  }

  // A thread issues up to kAtOnce loads before it stores, so that the latencies of the loads overlap.
  HW_DEVICE void send(int peer, int64_t first, int64_t end) const {
    constexpr int kAtOnce = 4;
    uint4* const target = reinterpret_cast<uint4*>(landing(peer, exchange.rank));
    const int64_t step = blockDim.x;
    for (int64_t from = first + threadIdx.x; from < end; from += kAtOnce * step) {
      uint4 vectors[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (from + n * step < end) vectors[n] = padded<uint4>(block_for(peer), count, from + n * step);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (from + n * step < end) target[from + n * step] = vectors[n];
      }
    }
  }

  // Polls a flag until its value is the number of this exchange or a later number, or the exchange is aborted. A peer that is
  // ahead sets later numbers.
  HW_DEVICE void wait(const uint32_t* flag) const {
    uint32_t seen = number - 1;
    for (uint32_t waited = 1; static_cast<int32_t>(seen - number) < 0; ++waited) {
      if (waited % 1024 == 0 && *static_cast<const volatile uint32_t*>(exchange.aborted)) return;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    }
  }
#else
  HW_DEVICE void begin() {}
#endif
};

template <class T, int kRanks>
using ScatteredSums = LandedBlocks<T, kRanks, true>;
template <class T, int kRanks>
using GatheredBlocks = LandedBlocks<T, kRanks, false>;

// Kernel argument for a result that a later kernel reduce-scatters. A store goes to the landing memory of the rank that gets the
// block. Stores to this rank's block go to `own`, and so do all stores if NCCL exchanges the blocks. The kernel calls begin()
// before the first store.
template <class T, int kRanks>
struct SentBlocks {
  LandedBlocks<T, kRanks, true> blocks;
  T* own;
  T* begins[kRanks];  // begins[rank] + i is the address of element i, if element i is in the block for `rank`

  HW_DEVICE T* operator+(int64_t i) const {
    T* begin = begins[0];
    HW_UNROLL
    for (int rank = 1; rank < kRanks; ++rank) begin = i >= rank * blocks.count ? begins[rank] : begin;
    return begin + i;
  }
  HW_DEVICE T& operator[](int64_t i) const { return *(*this + i); }

  HW_DEVICE void begin() {
#ifdef __CUDACC__
    if (!blocks.gathered) blocks.number = *static_cast<volatile uint32_t*>(blocks.exchange.state) + 1;
#endif
    HW_UNROLL
    for (int rank = 0; rank < kRanks; ++rank) {
      const bool is_own = blocks.gathered || rank == blocks.exchange.rank;
      begins[rank] = is_own ? own : reinterpret_cast<T*>(blocks.landing(rank, blocks.exchange.rank)) - rank * blocks.count;
    }
  }
};

// Pointer-like position in the sums or gathered blocks.
template <class T, int kRanks, bool kSums>
struct LandedBlocksAt {
  const LandedBlocks<T, kRanks, kSums>* blocks;
  int64_t first;

  HW_DEVICE LandedBlocksAt operator+(int64_t further) const { return {blocks, first + further}; }
  template <int kCount>
  HW_DEVICE auto load() const {
    return blocks->template values<kCount>(first);
  }
};

// Address whose alignment decides if vector accesses are possible. The bits of a block's size are included, because a
// vector must not cross the end of a block.
template <class T, int kRanks, bool kSums>
HW_DEVICE const void* address_of(const LandedBlocks<T, kRanks, kSums>& blocks) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(blocks.own) | blocks.count * sizeof(T));
}
template <class T, int kRanks>
HW_DEVICE const void* address_of(const SentBlocks<T, kRanks>& sent) {
  return address_of(sent.blocks);
}

}  // namespace hw
