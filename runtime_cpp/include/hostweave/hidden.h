// Pimpl without <memory>.
#pragma once

namespace hw {

// Owns one T, which must be complete only where it is constructed. Users compile programs, and <memory> and <vector> would
// dominate their compile time. Not copyable or movable.
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
