// Predicted time of one micro-kernel over one region. Where the tuner measured the kernel on this
// GPU, its numbers are used; elsewhere the same four numbers are derived from the device's
// attributes, so that one formula (waves x (fixed + K steps x step)) serves both.
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

struct KernelCost {
  bool legal;     // fits the device at all, and no table excludes it
  bool excluded;  // by a table: wrong on this GPU, or not worth planning with
  bool measured;
  int blocks_per_sm;
  double fixed_us, step_us, single_step_us;
  double arrive_us, slice_us;  // split-K: the last block of a tile arrives, adds up each slice
  // Launched early however many blocks it has: they crowd where the kernel in front is not.
  bool early;
  double tile_end_us;  // persistent: the end of a tile, of which a K step of the next hides
  double hidden_us;    // so much
};

// Costs of all kernels of a pack. `measured` has one entry for each, or is null. What it leaves out
// is derived and brought to the scale of those measured kernels that resemble it most, so that all
// of them compare; it must then promise a tenth more to be chosen.
std::vector<KernelCost> kernel_costs(const mp_kernel* kernels, int count, const mp_device& device,
                                     const DeviceModel& model, const mp_cost* measured);

// What a prediction needs to know of the work: one region of a problem.
struct Extent {
  int64_t m, n, k, batch;
  double unique_bytes;  // of A, B, C and Y: each is moved at least once
  int element_bytes;
  // Of the matrices as they are stored: rows that do not start at multiples of 128 bytes, the lines
  // of the caches, and rows of B that are shorter.
  bool a_crosses_lines, b_crosses_lines, b_rows_short;
  // Of what a column of B takes to load, the part that is in the memory once: the taps of a
  // convolution meet the same pixels.
  double b_distinct = 1;
};

constexpr int kLineBytes = 128;  // of the caches

// Of a K step, where persistent blocks with ragged shares of the work (stream-K) are at different
// K.
constexpr double kRaggedStepShare = 1.21;

// One K step in a wave of `blocks` that need not fill the device. Between the two costs that are
// known, what counts is how many blocks share an SM, or where only one fits, how many SMs work.
double step_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks);

// Bytes moved through the memory: every operand once, and what a wave streams beyond the L2 again
// with each further wave.
double traffic_bytes(const mp_kernel& kernel, const KernelCost& cost, const DeviceModel& model,
                     const Extent& extent, int split);

// Whether a kernel is launched before the one in front of it on the stream has ended: its blocks
// take the room that the other's leave. Where many fit an SM they end up on a few of them, so that
// of pointer kernels, dot products, copies and blocks of a warp or two only grids with room for
// that are: of half as many blocks as there are SMs, or of as many where each has a step or two. On
// an H200 those took 0.83 of the time otherwise, in the geometric mean; of longer ones with more
// blocks, many 1.1 to 1.9.
bool is_launched_early(const mp_kernel& kernel, int sm_count, int64_t blocks, int64_t steps);

// Of a launch, what is not hidden.
double launch_us(const mp_kernel& kernel, const KernelCost& cost, const DeviceModel& model,
                 int64_t blocks, int64_t steps);

// Of a persistent kernel's tile of `steps` K steps, what its end takes that no load hides.
double tile_end_us(const KernelCost& cost, double steps);

// How many times longer a K step is where tensor maps load rows that cross lines.
double crossing_share(const mp_kernel& kernel, const Extent& extent);

// Blocks that `tiles` output tiles are launched with.
int64_t grid_blocks(const mp_kernel& kernel, const KernelCost& cost, const DeviceModel& model,
                    int64_t tiles, int split);

// Microseconds, launch included. `split` <= K steps.
double predict_us(const mp_kernel& kernel, const KernelCost& cost, const DeviceModel& model,
                  const Extent& extent, int split);

}  // namespace moonpoly
#endif  // MOONPOLY_COST_MODEL_H_
