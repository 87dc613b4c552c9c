// What a class keeps to its own source file.
#pragma once

namespace hw {

// One T, which is complete where it is constructed and destroyed, and nowhere else. Programs are compiled by users, and to read
// <memory> and <vector> takes a compiler longer than the rest of a program.
template <class T>
class Hidden {
 public:
  template <class... Given>
  explicit Hidden(Given&&... given) : own_(new T(static_cast<Given&&>(given)...)) {}
  ~Hidden() { delete own_; }
  Hidden(Hidden&&) = delete;

  T& operator*() const { return *own_; }
  T* operator->() const { return own_; }

 private:
  T* own_;
};

}  // namespace hw
