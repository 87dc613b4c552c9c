// Pointer to an implementation. Replaces std::unique_ptr, because <memory> compiles slowly.
#pragma once

namespace hw {

// Owns a T. Only the constructor needs a complete type T.
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
