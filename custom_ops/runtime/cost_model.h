// What predictions of a micro-kernel's time rest on. Where the tuner measured the kernel on this
// GPU, its numbers are used; elsewhere the same four numbers are derived from the device's
// attributes, so that one formula (prediction.h) serves both.
#ifndef MOONPOLY_COST_MODEL_H_
#define MOONPOLY_COST_MODEL_H_

#include <vector>

#include "moonpoly.h"

namespace moonpoly {

// Properties of the device that every prediction shares.
struct DeviceModel {
  explicit DeviceModel(const mp_device& device, const mp_table* table);

  int sm, sm_count;
  double clocks_per_us;
  double bytes_per_us;  // DRAM
  double launch_us;
  double l2_bytes_per_clock;  // per SM
  double l2_bytes;
  double mma_f16, mma_tf32, fma_f32;  // multiply-adds per clock and SM
};

// Blocks of a kernel that one SM holds, by CUDA's occupancy rules; 0: it does not fit the device.
int blocks_per_sm(const mp_kernel& kernel, const mp_device& device);

// What plans depend on of a kernel: its members in mp_kernel, in 32 bytes instead of 328, since a
// search reads those of a whole class.
struct KernelTraits {
  KernelTraits() = default;
  explicit KernelTraits(const mp_kernel& kernel);

  int32_t bm, bn, bk, group_m;
  int16_t warps;
  int8_t family, dtype, precision, trans_a, trans_b;
  int8_t align_a, align_b, align_c;
  bool split_k : 1, persistent : 1, sliced : 1, pingpong : 1, bias_matrix : 1;
  bool dependent_launch : 1, swap : 1;
  bool tensor_maps : 1;  // its family uses them
};

// Two lines of the host's caches.
struct alignas(64) KernelCost {
  KernelTraits kernel;
  bool legal;     // fits the device at all, and no table excludes it
  bool excluded;  // by a table: wrong on this GPU, or not worth planning with
  bool measured;
  // Launched early however many blocks it has: they crowd where the kernel in front is not.
  bool early;
  bool joins;  // can run beside another (can_join in regions.h, which the planner asks)
  int16_t blocks_per_sm;
  double fixed_us, step_us, single_step_us;
  double arrive_us, slice_us;  // split-K: the last block of a tile arrives, adds up each slice
  double tile_end_us;          // persistent: the end of a tile, of which a K step of the next hides
  double hidden_us;            // so much
  // For least_us (prediction.h): what comes on top of loop and traffic, at least; a K step, at
  // least; a K step and a block's start and end divided by the blocks that the device holds.
  double least_beside_us, least_step_us, shared_step_us, shared_fixed_us;
};
static_assert(sizeof(KernelCost) == 128);

// Costs of all kernels of a pack. `measured` has one entry for each, or is null. What it leaves out
// is derived and brought to the scale of those measured kernels that resemble it most, so that all
// of them compare; it must then promise a tenth more to be chosen.
std::vector<KernelCost> kernel_costs(const mp_kernel* kernels, int count, const mp_device& device,
                                     const DeviceModel& model, const mp_cost* measured);

constexpr int kLineBytes = 128;  // of the GPU's caches

}  // namespace moonpoly
#endif  // MOONPOLY_COST_MODEL_H_
