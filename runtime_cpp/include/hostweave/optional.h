// A value or nothing. Replaces std::optional, because <optional> compiles slowly.
#pragma once

namespace hw {

template <class T>
class Optional {
 public:
  Optional& operator=(const T& value) {
    value_ = value;
    has_value_ = true;
    return *this;
  }
  void reset() { has_value_ = false; }

  const T& operator*() const { return value_; }
  bool operator==(const T& value) const { return has_value_ && value_ == value; }

 private:
  T value_{};
  bool has_value_ = false;
};

}  // namespace hw
