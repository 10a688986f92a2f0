// Predicted time of one micro-kernel over one region: waves x (fixed + K steps x step), beside the
// traffic. Written once, for every kernel, device and plan.
#ifndef MOONPOLY_PREDICTION_H_
#define MOONPOLY_PREDICTION_H_

#include "cost_model.h"
#include "moonpoly.h"

namespace moonpoly {

// What a prediction needs to know of the work: one region of a problem.
struct Extent {
  int64_t m, n, k, batch;
  double unique_bytes;  // of A, B, C and Y: each is moved at least once
  int element_bytes;
  // Of the matrices as they are stored: rows that do not start at multiples of 128 bytes, the lines
  // of the caches, and rows of B that are shorter.
  bool a_crosses_lines, b_crosses_lines, b_rows_short;
  // What follows the product (finish_clocks); 0: nothing.
  double finish_clocks;
  // Of what a column of B takes to load, the part that is in the memory once: the taps of a
  // convolution meet the same pixels.
  double b_distinct = 1;
};

// How a kernel's tiles cover that. Derived once for all splits.
struct Tiling {
  int64_t rows, columns, tiles;  // rows * columns of each batch entry
  int steps;                     // K steps of a tile

  Tiling(const KernelTraits& k, const Extent& e)
      : rows((e.m + k.bm - 1) / k.bm),
        columns((e.n + k.bn - 1) / k.bn),
        tiles(rows * columns * e.batch),
        steps(static_cast<int>((e.k + k.bk - 1) / k.bk)) {}
};

// Of a K step, where persistent blocks with ragged shares of the work (stream-K) are at different
// K.
constexpr double kRaggedStepShare = 1.21;

// One K step in a wave of `blocks` that need not fill the device. Between the two costs that are
// known, what counts is how many blocks share an SM, or where only one fits, how many SMs work.
double step_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks);

// Bytes moved through the memory: every operand once, and what a wave streams beyond the L2 again
// with each further wave.
double traffic_bytes(const KernelCost& cost, const DeviceModel& model, const Extent& extent,
                     const Tiling& tiling, int split);

// Whether a kernel is launched early (see the next one) whatever its grid.
bool is_always_early(const KernelTraits& kernel);

// Whether a kernel is launched before the one in front of it on the stream has ended: its blocks
// take the room that the other's leave. Where many fit an SM they end up on a few of them, so that
// of pointer kernels, dot products, copies and blocks of a warp or two only grids with room for
// that are: of half as many blocks as there are SMs, or of as many where each has a step or two. On
// an H200 those took 0.83 of the time otherwise, in the geometric mean; of longer ones with more
// blocks, many 1.1 to 1.9.
bool is_launched_early(const KernelTraits& kernel, int sm_count, int64_t blocks, int64_t steps);

// Of a launch, what is not hidden.
double launch_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks, int64_t steps);

// Of a persistent kernel's tile of `steps` K steps, what its end takes that no load hides.
double tile_end_us(const KernelCost& cost, double steps);

// Clocks in which the warps of a scheduler do for 32 elements of the product what follows it (an
// activation, R, the pairs of a gated one, a wider type), beyond what a plain epilogue takes; 0
// where nothing follows.
double finish_clocks(const mp_problem& problem);

// us that this takes at the end of a tile and that nothing hides.
struct Finish {
  double each;  // of the tiles of a block but the last
  double last;
};
Finish finish_of(const KernelCost& cost, const DeviceModel& model, const Extent& extent,
                 const Tiling& tiling);

// How many times longer a K step is where tensor maps load rows that cross lines.
double crossing_share(const KernelTraits& kernel, const Extent& extent);

// Blocks that `tiles` output tiles are launched with.
int64_t grid_blocks(const KernelCost& cost, const DeviceModel& model, int64_t tiles, int split);

// Microseconds, launch included. `split` <= K steps.
double predict_us(const KernelCost& cost, const DeviceModel& model, const Extent& extent,
                  const Tiling& tiling, int split);

// No prediction of the kernel for that extent is below this, whatever its split: it tells which
// kernels need no prediction. `traffic_us`: of the extent's unique bytes.
double least_us(const KernelCost& cost, const Tiling& tiling, double traffic_us);

// What least_us reads, derived from the other costs.
void set_bounds(const DeviceModel& model, KernelCost* cost);

}  // namespace moonpoly
#endif  // MOONPOLY_PREDICTION_H_
