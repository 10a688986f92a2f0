#include "cost_model.h"

#include <algorithm>
#include <cmath>

#include "pack.h"

namespace moonpoly {
namespace {

// Dense multiply-adds per clock and SM, and bytes per clock and SM that the L2 sustains, per
// architecture: vendor data sheets divided by SMs and clock (H200: 989 TFLOP/s / 132 / 1.83 GHz /
// 2).
struct ArchitectureRates {
  int sm;
  double f16, tf32, f32, l2_bytes;
};
constexpr ArchitectureRates kRates[] = {
    {80, 1024, 512, 64, 32},   {86, 512, 256, 128, 20},    {89, 512, 256, 128, 20},
    {90, 2048, 1024, 128, 40}, {100, 4096, 2048, 128, 44}, {120, 512, 256, 128, 24},
};

const ArchitectureRates& rates_of(int sm) {
  const ArchitectureRates* best = &kRates[0];
  for (const auto& r : kRates) {
    if (r.sm <= sm) best = &r;
  }
  return *best;
}

// Sustained under load, as a share of the figure that the driver reports.
constexpr double kClockShare = 0.88, kBandwidthShare = 0.88;
constexpr double kMmaShare = 0.85;      // of the data-sheet rate, in the steady state of a K loop
constexpr double kWarpMmaShare = 0.60;  // mma.sync against wgmma on sm_90
constexpr double kFmaShare = 0.55;      // IEEE fp32: operands come from shared memory
constexpr double kSharedBytesPerClock = 128;  // one SM
constexpr double kLoadLatency = 900;          // clocks from issuing a tile load to its arrival
constexpr double kBlockClocks = 1800;         // block start, barriers, first tiles
constexpr double kStepClocks = 60;            // barrier wait and issue of one K step
constexpr double kAsyncStepClocks = 20;       // the same where a warp of its own loads ahead
constexpr double kStoreBytesPerClock = 24;    // epilogue, one SM
constexpr double kUnoverlappedShare = 0.05;
constexpr double kArriveClocks = 2500;  // split-K: fence, atomic, and the wait of the last block

// A persistent block loads its next tile during the epilogue of this one.
constexpr double kTurnShare = 0.3;  // of the fixed time, for every tile after the first

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int occupancy(const mp_kernel& k, const mp_device& d) {
  // 1 KB of shared memory per block is the system's; registers are allocated per warp in units of
  // 256.
  const int shared = k.shared_bytes + 1024;
  const int warp_registers = (std::max(k.registers, 16) * 32 + 255) / 256 * 256;
  if (k.shared_bytes > d.shared_per_block || k.warps * 32 > d.threads_per_sm) return 0;
  return std::min({d.shared_per_sm / shared, d.registers_per_sm / (warp_registers * k.warps),
                   d.threads_per_sm / (k.warps * 32), d.blocks_per_sm});
}

// Clocks of one K step when `resident` blocks share an SM.
double step_clocks(const mp_kernel& k, const DeviceModel& model, int resident) {
  const int bytes = element_bytes(k.dtype);
  const double a_bytes = double(k.bm) * k.bk * bytes, b_bytes = double(k.bn) * k.bk * bytes;

  // Rows on the side that the instruction lays out over warps: the transposed tile swaps them.
  const int rows = k.swap ? k.bn : k.bm, columns = k.swap ? k.bm : k.bn;
  const bool fma = k.dtype == MP_F32 && k.precision == MP_IEEE;
  const bool warpgroup = model.sm == 90 && !fma && rows >= 64 && k.warps >= 4;
  double rate = fma                 ? model.fma_f32 * kFmaShare
                : k.dtype == MP_F32 ? model.mma_tf32 * kMmaShare
                                    : model.mma_f16 * kMmaShare;
  if (model.sm == 90 && !fma && !warpgroup) rate *= kWarpMmaShare;
  const double mma = double(rows) * columns * k.bk / rate;

  double shared = a_bytes + b_bytes;  // the loads into shared memory
  if (warpgroup) {
    const int groups = std::max(1, rows / 64);
    shared += (k.swap ? b_bytes : a_bytes) + (k.swap ? a_bytes : b_bytes) * groups / 2;
  } else {
    const int across = std::max(1, static_cast<int>(std::sqrt(double(k.warps))));
    shared += a_bytes * across + b_bytes * ((k.warps + across - 1) / across);
  }

  // Narrow accesses cost one load instruction per `align` bytes and lane; below 4 bytes there is no
  // asynchronous copy, so that the K loop is not pipelined.
  double issue = k.persistent ? kAsyncStepClocks : kStepClocks, depth = std::max(1, k.stages - 1);
  if (k.family == MP_GEMM_POINTER) {
    issue += 60 + (a_bytes / k.align_a + b_bytes / k.align_b) / 32;
    if (k.align_a < 4 || k.align_b < 4) depth = 1;
  }
  return std::max({resident * mma, resident * shared / kSharedBytesPerClock,
                   resident * (a_bytes + b_bytes) / model.l2_bytes_per_clock,
                   k.persistent ? 0.0 : resident * (issue - kStepClocks), mma + issue,
                   kLoadLatency / depth});
}

}  // namespace

DeviceModel::DeviceModel(const mp_device& device, const mp_table* table) {
  const ArchitectureRates& rates = rates_of(device.sm);
  sm = device.sm;
  sm_count = std::max(1, device.sm_count);
  clocks_per_us = std::max(1, device.clock_mhz) * kClockShare;
  // Two transfers per memory clock; MHz * bytes = bytes per microsecond.
  const double derived =
      2.0 * device.memory_clock_mhz * device.memory_bus_bits / 8 * kBandwidthShare;
  bytes_per_us = table && table->bandwidth_gbps > 0 ? table->bandwidth_gbps * 1e3
                 : device.bandwidth_gbps > 0        ? device.bandwidth_gbps * 1e3
                                                    : std::max(derived, 1e4);
  launch_us = table && table->launch_us > 0 ? table->launch_us : 2.0;
  l2_bytes_per_clock = rates.l2_bytes;
  l2_bytes = static_cast<double>(device.l2_bytes);
  mma_f16 = rates.f16;
  mma_tf32 = rates.tf32;
  fma_f32 = rates.f32;
}

KernelCost KernelCost::of(const mp_kernel& k, const mp_device& device, const DeviceModel& model,
                          const mp_cost* measured) {
  KernelCost cost{};
  const int resident = occupancy(k, device);
  cost.legal = resident > 0;
  if (!cost.legal) return cost;
  cost.measured = measured && measured->step_us > 0;
  if (cost.measured) {
    cost.blocks_per_sm = std::max(1, static_cast<int>(std::lround(measured->blocks_per_sm)));
    cost.fixed_us = measured->fixed_us;
    cost.step_us = measured->step_us;
    cost.single_step_us =
        measured->single_step_us > 0 ? measured->single_step_us : measured->step_us;
  } else {
    cost.blocks_per_sm = resident;
    const double epilogue =
        double(k.bm) * k.bn * element_bytes(k.dtype) * resident / kStoreBytesPerClock;
    cost.fixed_us = (kBlockClocks + epilogue) / model.clocks_per_us;
    cost.step_us = step_clocks(k, model, resident) / model.clocks_per_us;
    cost.single_step_us = step_clocks(k, model, 1) / model.clocks_per_us;
  }
  cost.fixup_fixed_us = kArriveClocks / model.clocks_per_us;
  cost.fixup_slice_us =
      double(k.bm) * k.bn * sizeof(float) / model.l2_bytes_per_clock / model.clocks_per_us;
  return cost;
}

int64_t grid_blocks(const mp_kernel& k, const KernelCost& cost, const DeviceModel& model,
                    int64_t tiles, int split) {
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  return k.persistent ? std::min(tiles * split, slots) : tiles * split;
}

namespace {

// One K step of a block where the grid puts `blocks` of them on the device at once: with one block
// per SM a step takes single_step_us, with all slots taken step_us.
double step_time(const KernelCost& cost, const DeviceModel& model, int64_t blocks) {
  if (cost.blocks_per_sm == 1) return cost.step_us;
  const int resident = ceil_div(blocks, model.sm_count);
  return cost.single_step_us +
         (cost.step_us - cost.single_step_us) * (resident - 1) / (cost.blocks_per_sm - 1);
}

// Waves of blocks, one tile (or slice of one) each.
double waves_us(const KernelCost& cost, const DeviceModel& model, int64_t blocks, double steps) {
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  const int64_t full = blocks / slots, rest = blocks % slots;
  double compute = full * (cost.fixed_us + steps * cost.step_us);
  if (rest > 0) compute += cost.fixed_us + steps * step_time(cost, model, rest);
  return compute;
}

// Blocks that walk over tiles; with split > 1 the last of them are shared out in equal parts.
double persistent_us(const KernelCost& cost, const DeviceModel& model, int64_t tiles,
                     int64_t blocks, double steps, int split) {
  const double rounds = split > 1 ? double(tiles) / blocks : double(ceil_div(tiles, blocks));
  return cost.fixed_us + rounds * steps * step_time(cost, model, blocks) +
         kTurnShare * cost.fixed_us * std::max(0.0, std::ceil(rounds) - 1);
}

// Split-K: partial tiles go out and come back; the block that finishes a tile adds them up. Shares
// of K leave each block with one partial tile, and each tile with those of the blocks before.
double fixup_us(const mp_kernel& k, const KernelCost& cost, const DeviceModel& model, int64_t tiles,
                int64_t blocks, int split) {
  const double slices = k.persistent ? 1 + std::max(1.0, double(blocks) / tiles) : split;
  const double partials = 2.0 * blocks * k.bm * k.bn * sizeof(float);
  return cost.fixup_fixed_us + slices * cost.fixup_slice_us +
         partials / (model.l2_bytes_per_clock * model.sm_count * model.clocks_per_us);
}

}  // namespace

double predict_us(const mp_kernel& k, const KernelCost& cost, const DeviceModel& model,
                  const Extent& e, int split) {
  const int64_t rows = (e.m + k.bm - 1) / k.bm, columns = (e.n + k.bn - 1) / k.bn;
  const int64_t tiles = rows * columns * e.batch;
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  const int64_t blocks = grid_blocks(k, cost, model, tiles, split);
  const double compute = k.persistent
                             ? persistent_us(cost, model, tiles, blocks, ceil_div(e.k, k.bk), split)
                             : waves_us(cost, model, blocks, ceil_div(ceil_div(e.k, k.bk), split));

  // DRAM: every operand once; what a wave streams beyond the L2 again with each further wave.
  double bytes = e.unique_bytes;
  const double waves = k.persistent ? double(tiles) / slots : double(blocks) / slots;
  if (waves >= 1 && bytes > model.l2_bytes) {
    const double high = std::min<int64_t>(std::max(k.group_m, 1), rows);
    const double wide = std::min<double>(std::ceil(slots / high), columns);
    const double wave = (high * k.bm + wide * k.bn) * double(e.k) * e.element_bytes;
    bytes = std::max(bytes, wave * waves);
  }
  const double fixup = split > 1 ? fixup_us(k, cost, model, tiles, blocks, split) : 0;
  // Arithmetic and traffic overlap but for a rest, which also decides between kernels at the floor.
  const double traffic = bytes / model.bytes_per_us;
  return model.launch_us + std::max(compute, traffic) +
         kUnoverlappedShare * std::min(compute, traffic) + fixup;
}

}  // namespace moonpoly
