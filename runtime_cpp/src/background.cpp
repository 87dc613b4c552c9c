#include "hostweave/background.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

namespace hw {
namespace {

struct Threads {
  std::mutex mutex;
  std::condition_variable ended;
  int running = 0;
};
Threads& threads() { return immortal<Threads>(); }

}  // namespace

void in_background(std::function<void()> work) {
  {
    const std::lock_guard lock(threads().mutex);
    ++threads().running;
  }
  try {
    std::thread([work = std::move(work)]() mutable {
      work();
      work = nullptr;
      std::unique_lock lock(threads().mutex);
      --threads().running;
      // The notification comes after the destructors of the thread's thread_local objects.
      std::notify_all_at_thread_exit(threads().ended, std::move(lock));
    }).detach();
  } catch (...) {
    const std::lock_guard lock(threads().mutex);
    --threads().running;
    throw;
  }
}

void finish_background(double seconds) {
  std::unique_lock lock(threads().mutex);
  const auto done = [] { return threads().running == 0; };
  if (threads().ended.wait_for(lock, std::chrono::duration<double>(seconds), done)) return;
  on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        _exit(status);
      },
      nullptr);
}

}  // namespace hw
