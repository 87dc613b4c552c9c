// What a class keeps to its own source file.
#pragma once

namespace hw {

// One T, which is complete where it is constructed, and nowhere else. Programs are compiled by users, and to read <memory> and
// <vector> takes a compiler longer than the rest of a program. What has one is neither copied nor moved.
template <class T>
class Hidden {
 public:
  template <class... Given>
  explicit Hidden(Given&&... given) : own_(new T(static_cast<Given&&>(given)...)), destroy_([](const T* own) { delete own; }) {}
  ~Hidden() { destroy_(own_); }
  Hidden(Hidden&&) = delete;

  T& operator*() const { return *own_; }
  T* operator->() const { return own_; }

 private:
  T* own_;
  void (*destroy_)(const T* own);
};

}  // namespace hw
