// Choice of the next step in seeded mode.
#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace hostweave::cpu {

struct HostThread;
struct Stream;

struct Candidate {
  HostThread* host;  // host thread, or null
  Stream* stream;    // or null
  int device;
  int number;               // stream number
  std::uint64_t* priority;  // kept between picks; 0 until the picker draws a priority
};

class Picker {
 public:
  Picker(std::uint64_t seed, int kind);  // kind: hw_cpu_picker
  std::size_t pick(const std::vector<Candidate>& candidates);
  // Gives a candidate the lowest priority. Used for priority changes, and for a candidate that polls, so that others run.
  void demote(std::uint64_t& priority) { priority = --lowest_; }
  // A random setting, determined by the seed.
  bool coin(int which) const { return (mixed_ >> which) & 1; }
  std::size_t draw(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  std::uint64_t steps() const { return steps_; }
  std::uint64_t hash() const { return hash_; }

 private:
  std::size_t highest(const std::vector<Candidate>& candidates, bool streams_only);

  std::mt19937_64 random_;
  std::uint64_t mixed_;
  int kind_;                           // not HW_CPU_MIXED
  std::uint64_t change_every_ = 0;     // mean number of steps between priority changes; 0: never
  std::uint64_t lowest_ = 1ull << 32;  // last demoted priority; demoted priorities are below 2^32, drawn priorities are not
  std::uint64_t steps_ = 0;
  std::uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace hostweave::cpu
