// A copy that takes its time: it sleeps so many seconds, times the slowness of the device that it runs on, noise upon it.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {
constexpr int kDevices = 64;
struct World {
  double slowness[kDevices];
  double noise = 0, outliers = 0;  // uniform within +-noise; a share of the tasks takes 1 + gamma(2, 1) times as long
  std::mt19937_64 draw;
  std::mutex mutex;
  World() { for (double& s : slowness) s = 1; }
  double factor(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    double found = slowness[device % kDevices] * (1 + std::uniform_real_distribution<>(-noise, noise)(draw));
    if (std::uniform_real_distribution<>()(draw) < outliers) found *= 1 + std::gamma_distribution<>(2, 1)(draw);
    return found;
  }
};
World world;

ffi::Error Nap(int32_t device, double seconds, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds * world.factor(device)));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
}  // namespace

extern "C" void set_slowness(int device, double factor) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.slowness[device % kDevices] = factor;
}

extern "C" void set_noise(double noise, double outliers, int seed) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.noise = noise, world.outliers = outliers, world.draw.seed(seed);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(nap, Nap,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<double>("seconds")
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
