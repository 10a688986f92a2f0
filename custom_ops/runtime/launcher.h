// A pack on one device: its modules, and the launch of plans. Launching allocates nothing,
// synchronises nothing and loads nothing, so that it can be captured in a CUDA graph and called
// from several threads at once.
#ifndef MOONPOLY_LAUNCHER_H_
#define MOONPOLY_LAUNCHER_H_

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"
#include "moonpoly.h"
#include "tensor_maps.h"

namespace moonpoly {

class Pack;
class Vendor;

struct Operands {
  const void *a, *b, *bias;
  void* y;
  const void* residual = nullptr;
};

class Launcher {
 public:
  // Shared by every session that uses this pack on this device.
  static std::shared_ptr<Launcher> get(std::shared_ptr<const Pack> pack, int ordinal);
  ~Launcher();

  // Loads every kernel of a dtype and precision; does nothing the second time.
  void load(int dtype, int precision);

  // Makes the handle of cuBLASLt, unless there is one; plans that use it need it. Throws
  // Error(MP_NO_DRIVER) where the library is absent.
  void load_vendor();

  // Bytes of workspace that a plan with cuBLASLt takes at these operands, at most what it says; -1
  // where cuBLASLt has no algorithm for them.
  int64_t vendor_workspace(const mp_problem& problem, const mp_plan& plan,
                           const Operands& operands);

  // The kernels that the plan names must be loaded.
  void launch(const mp_problem& problem, const mp_plan& plan, const Operands& operands,
              void* workspace, void* counters, CUstream stream);
  // The same for a convolution; `operands` are W, X, bias and Y.
  void launch_conv(const mp_conv& conv, const mp_plan& plan, const Operands& operands,
                   void* workspace, void* counters, CUstream stream);

  // Copies A (operand 0) or B (1) of a problem to `target`.
  void copy(const mp_problem& problem, const mp_copy& copy, int operand, const void* source,
            void* target, CUstream stream);

  // Zeroed arrival counters that belong to the stream, or null: then (no room, or the handle means
  // several streams, or the stream is being captured, and a graph may replay beside its own stream)
  // clear some yourself with `clear`.
  void* counters_for(CUstream stream, int64_t count);
  void clear(void* counters, int64_t count, CUstream stream);

  const Pack& pack() const { return *pack_; }
  CUcontext context() const { return context_.get(); }

 private:
  Launcher(std::shared_ptr<const Pack> pack, int ordinal);
  void load_kernel(int index);
  // Held while a plan that uses a stream's counters is queued: between two regions that run side by
  // side, another thread could queue a kernel on the stream, which would run beside the second one
  // and count in the same place.
  std::unique_lock<std::mutex> turn_of(const void* counters);
  void launch_regions(const mp_problem& problem, const mp_region* regions, int count,
                      const Operands& operands, void* workspace, void* counters, CUstream stream);
  // The tensor map of an operand (0 to 2: A, B, Y) of a kernel of the pack.
  void map_of(int kernel, int operand, const Matrix& matrix, CUtensorMap* out);

  static constexpr int kSlots = 64;
  static constexpr int64_t kCountersPerSlot = 4096;  // 16 KB a stream

  struct Slot {
    std::atomic<bool> taken{false};
    std::atomic<CUstream> stream{nullptr};
    std::mutex turn;
  };

  const std::shared_ptr<const Pack> pack_;
  const int ordinal_;
  const PrimaryContext context_;
  int sm_count_;
  std::mutex load_mutex_;
  std::array<std::atomic<bool>, 6> loaded_{};  // by dtype and precision
  std::vector<CUmodule> modules_;
  std::vector<CUfunction> functions_;
  TensorMaps maps_;
  std::unique_ptr<Vendor> vendor_;
  std::atomic<bool> vendor_loaded_{false};
  CUdeviceptr counters_ = 0;
  std::mutex slot_mutex_;
  std::array<Slot, kSlots> slots_;
};

}  // namespace moonpoly
#endif  // MOONPOLY_LAUNCHER_H_
