// Memory of a thread, kept from call to call.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace oddrank {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch &) = delete;
  ~Scratch() { std::free(memory_); }

  // 64-byte aligned; what was there is lost where it grows.
  float *floats(int64_t count) {
    if (count > size_) {
      std::free(memory_);
      size_ = (count + 1023) / 1024 * 1024;
      memory_ = static_cast<float *>(std::aligned_alloc(64, size_t(size_) * 4));
      if (!memory_) throw std::bad_alloc();
    }
    return memory_;
  }

 private:
  float *memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace oddrank
