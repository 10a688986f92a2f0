#include "prediction.h"

#include <algorithm>
#include <cmath>

#include "pack.h"

namespace moonpoly {
namespace {

// Fitted with those in cost_model.cc.
constexpr double kCrossingShare = 0.144;  // more for a loop whose rows cross lines at the end
constexpr double kShortRowClocks = 0.96;  // a row of B shorter than a line that TMA loads
constexpr double kEarlyLaunchUs = 0.40;   // of a launch, hidden by programmatic dependent launch
constexpr double kRoomyLaunchUs = 0.45;   // the same of a kernel for which there is room
// Blocks placed early find room beside the kernel in front only, and crowd there: the share by
// which a wave that is partly full is nearer to a full one.
constexpr double kCrowding = 0.52;
// The blocks of one wave that share an SM start one after the other, each of their warps that much
// later. What 113 one-wave plans of up to 4 K steps took beyond their promise, on an H200, was a
// median of 0.08 us per such warp, 0.06 to 0.11 for half of them, whatever their family and size.
constexpr double kWarpStartClocks = 175;

// What follows the product, on an H200 (benchmarks/results/h200/epilogues.csv): all of it goes
// another way than a plain tile, then come the formula and R. Per 32 elements, in clocks of a
// scheduler whose warps all take part; one that is alone waits for what it computes.
constexpr double kFinishClocks = 10, kSigmoidClocks = 10, kGeluTanhClocks = 12, kGeluClocks = 21;
constexpr double kResidualClocks = 23;
constexpr double kAloneShare = 1.7;
constexpr int kLanesOfSm = 128;

constexpr double kRounding = 1e-9;  // by which a bound and a prediction may be off, relatively

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

// Blocks of the others are small: many of them fit an SM. So too of tensor-map kernels with a warp
// or two: 551 blocks of 16x32x64 took 7.4 us launched early, on an H200, and 3.4 us are enough.
bool is_always_early(const KernelTraits& k) {
  return k.dependent_launch && k.tensor_maps && k.warps >= 4;
}

int64_t grid_blocks(const KernelCost& cost, const DeviceModel& model, int64_t tiles, int split) {
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  return cost.kernel.persistent ? std::min(tiles * split, slots) : tiles * split;
}

double step_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks) {
  double crowd = cost.blocks_per_sm > 1
                     ? double(ceil_div(blocks, model.sm_count) - 1) / (cost.blocks_per_sm - 1)
                     : double(blocks) / model.sm_count;
  if (cost.early && cost.blocks_per_sm > 1 && 2 * blocks > model.sm_count) {
    crowd += kCrowding * (1 - crowd);
  }
  return cost.single_step_us + (cost.step_us - cost.single_step_us) * crowd;
}

namespace {

// Waves of blocks, one tile (or slice of one) each. `fixed_us` is each wave's time beside its loop.
double waves_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks, double steps,
                double fixed_us) {
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  const int64_t full = blocks / slots, rest = blocks % slots;
  double compute = full * (fixed_us + steps * cost.step_us);
  if (rest > 0) compute += fixed_us + steps * step_us(cost, model, rest);
  return compute;
}

// Persistent blocks: the loop of the busiest one, which hides the end of all but its last tile
// behind the next one's loads. Blocks with `ragged` shares are at different K steps of their tiles
// at the same time, so that they presumably find less in the L2 that others have read.
double persistent_us(const KernelCost& cost, const DeviceModel& model, int64_t tiles,
                     int64_t blocks, double steps, int split, bool ragged, const Finish& finish) {
  const double share =
      split > 1 ? std::ceil(tiles * steps / blocks) : ceil_div(tiles, blocks) * steps;
  const double ends = (ceil_div(tiles, blocks) - 1) * (tile_end_us(cost, steps) + finish.each);
  return share * step_us(cost, model, blocks) * (ragged ? kRaggedStepShare : 1) + ends;
}

}  // namespace

double traffic_bytes(const KernelCost& cost, const DeviceModel& model, const Extent& e,
                     const Tiling& t, int split) {
  const KernelTraits& k = cost.kernel;
  if (is_depthwise(k.family)) return e.unique_bytes;  // tiles share no channel of X
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  // Every operand once; what a wave streams beyond the L2 again with each further wave.
  double bytes = e.unique_bytes;
  const double waves = double(k.persistent ? t.tiles : t.tiles * split) / slots;
  if (waves >= 1 && bytes > model.l2_bytes) {
    const double high = std::min<int64_t>(std::max(k.group_m, 1), t.rows);
    const double wide = std::min<double>(std::ceil(slots / high), t.columns);
    const double wave = (high * k.bm + wide * k.bn * e.b_distinct) * double(e.k) * e.element_bytes;
    bytes = std::max(bytes, wave * waves);
  }
  return bytes;
}

bool is_launched_early(const KernelTraits& k, int sm_count, int64_t blocks, int64_t steps) {
  if (!k.dependent_launch) return false;
  return is_always_early(k) || 2 * blocks <= sm_count || (blocks <= sm_count && steps <= 2);
}

double launch_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks, int64_t steps) {
  double hidden = 0;
  if (is_launched_early(cost.kernel, model.sm_count, blocks, steps)) {
    hidden = cost.early ? kEarlyLaunchUs : kRoomyLaunchUs;
  }
  return std::max(0.0, model.launch_us - hidden);
}

double tile_end_us(const KernelCost& cost, double steps) {
  return std::max(0.0, cost.tile_end_us - steps * cost.hidden_us);
}

double finish_clocks(const mp_problem& p) {
  if (!p.activation && !p.residual && !p.gated && !p.wide) return 0;
  const double clocks = kFinishClocks + (p.residual ? kResidualClocks : 0);
  // Of a gated product every other column is activated.
  const double share = p.gated ? 0.5 : 1;
  switch (p.activation) {
    case MP_ACT_SIGMOID:
    case MP_ACT_TANH:
    case MP_ACT_QUICK_GELU:
    case MP_ACT_SILU:
      return clocks + share * kSigmoidClocks;
    case MP_ACT_GELU_TANH:
      return clocks + share * kGeluTanhClocks;
    case MP_ACT_GELU:
      return clocks + share * kGeluClocks;
    default:
      return clocks;
  }
}

Finish finish_of(const KernelCost& cost, const DeviceModel& model, const Extent& e,
                 const Tiling& tiling) {
  if (e.finish_clocks == 0) return {0, 0};
  const KernelTraits& k = cost.kernel;
  const double tile = e.finish_clocks * k.bm * k.bn / kLanesOfSm / model.clocks_per_us;
  if (k.pingpong) {
    // Behind it the other consumer multiplies its tile.
    const double own = kAloneShare * tile;
    return {std::max(0.0, own - tiling.steps * cost.step_us), own};
  }
  // Blocks that share an SM hide half of it behind each other's products.
  const double blocks =
      std::min<int64_t>(cost.blocks_per_sm, ceil_div(tiling.tiles, model.sm_count));
  const double us = tile * std::max(1.0, blocks / 2);
  return {us, us};
}

double crossing_share(const KernelTraits& k, const Extent& e) {
  if (!k.tensor_maps) return 1;
  const double crossing = (e.a_crosses_lines ? k.bm : 0) + (e.b_crosses_lines ? k.bn : 0);
  return 1 + kCrossingShare * crossing / (k.bm + k.bn);
}

namespace {

// How much later than the first block the last one starts on the SM that has most of a wave.
double start_us(const KernelTraits& k, const DeviceModel& model, int64_t blocks) {
  return kWarpStartClocks * k.warps * (ceil_div(blocks, model.sm_count) - 1) / model.clocks_per_us;
}

}  // namespace

double predict_us(const KernelCost& cost, const DeviceModel& model, const Extent& e,
                  const Tiling& tiling, int split) {
  const KernelTraits& k = cost.kernel;
  const int64_t tiles = tiling.tiles;
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  const int64_t blocks = grid_blocks(cost, model, tiles, split);
  const bool ragged = split > 1 && blocks < tiles * split;
  const int steps = ceil_div(tiling.steps, split);
  const Finish finish = finish_of(cost, model, e, tiling);
  double loop;
  if (k.persistent) {
    loop = persistent_us(cost, model, tiles, blocks, tiling.steps, split, ragged, finish);
  } else {
    // Split-K: each block's partial tile is read back by the last block of its tile, which in a
    // later wave works beside others.
    const double wave_fixed = cost.fixed_us + finish.each + (split > 1 ? cost.slice_us : 0);
    loop = waves_us(cost, model, blocks, steps, wave_fixed) - wave_fixed;
    if (blocks <= slots) loop += start_us(k, model, blocks);
  }
  loop *= crossing_share(k, e);
  if (k.tensor_maps && e.b_rows_short) {
    const double loads =
        k.persistent && split == 1
            ? double(ceil_div(tiles, blocks)) * tiling.steps
            : std::ceil(double(tiles) * tiling.steps / (k.persistent ? blocks : tiles * split));
    loop += ceil_div(blocks, model.sm_count) * loads * k.bk * kShortRowClocks / model.clocks_per_us;
  }
  // The last block of a tile adds up all of its slices; a persistent one has its own at hand, yet
  // at the end of a ragged share it has also stored one of another tile.
  const double slices = k.sliced       ? 1  // together: a block reads as much as one part
                        : k.persistent ? std::max(1.0, double(blocks) / tiles) - (ragged ? 0 : 1)
                                       : split;
  const double fixup = split > 1 ? cost.arrive_us + slices * cost.slice_us : 0;

  // The loops and the traffic overlap, yet wait for each other where they take about as long. No
  // block computes or streams while the first ones start and the last ones end.
  const double traffic = traffic_bytes(cost, model, e, tiling, split) / model.bytes_per_us;
  return launch_us(cost, model, blocks, steps) + cost.fixed_us + std::hypot(loop, traffic) + fixup +
         finish.last;
}

// A step that b of the device's s slots take part in lasts b / s of `shared_step_us` * s or longer:
// step_us is linear in the blocks of an SM, and at one and at all of them that is so. Hence no wave
// is shorter than its share of the device's time. A split of n leaves steps / n or more to a block
// and n slices to add up, of which two are in `least_beside_us`; the sum of a / n and n * b is
// never below twice the root of a * b.
double least_us(const KernelCost& cost, const Tiling& tiling, double traffic_us) {
  const double steps = tiling.steps;
  double loop = tiling.tiles * (steps * cost.shared_step_us + cost.shared_fixed_us);
  double fixup = 0;
  if (!cost.kernel.split_k) {
    const double first = cost.kernel.persistent ? 0 : cost.fixed_us;
    loop = std::max(loop - first, steps * cost.least_step_us);
  } else if (!cost.kernel.persistent) {
    fixup = 2 * (std::sqrt(steps * cost.least_step_us * cost.slice_us) - cost.slice_us);
  }
  return (cost.least_beside_us + std::max({loop, traffic_us, fixup})) * (1 - kRounding);
}

void set_bounds(const DeviceModel& model, KernelCost* cost) {
  const KernelTraits& k = cost->kernel;
  const double slots = double(model.sm_count) * cost->blocks_per_sm;
  const double hidden = !k.dependent_launch ? 0 : cost->early ? kEarlyLaunchUs : kRoomyLaunchUs;
  cost->least_beside_us = std::max(0.0, model.launch_us - hidden) + cost->fixed_us;
  if (k.split_k) cost->least_beside_us += cost->arrive_us + (k.persistent ? 1 : 2) * cost->slice_us;
  cost->least_step_us = std::min(cost->step_us, cost->single_step_us);
  cost->shared_step_us =
      std::min(cost->step_us, cost->blocks_per_sm * cost->single_step_us) / slots;
  cost->shared_fixed_us = k.persistent || k.split_k ? 0 : cost->fixed_us / slots;
}

}  // namespace moonpoly
