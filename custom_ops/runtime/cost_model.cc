#include "cost_model.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "pack.h"
#include "prediction.h"

namespace moonpoly {
namespace {

// Dense multiply-adds per clock and SM: vendor data sheets divided by SMs and clock (H200: 989
// TFLOP/s / 132 / 1.83 GHz / 2). Bytes per clock and SM that the L2 hands out when all SMs draw.
struct ArchitectureRates {
  int sm;
  double f16, tf32, f32, l2_bytes;
};
constexpr ArchitectureRates kRates[] = {
    {80, 1024, 512, 64, 40},   {86, 512, 256, 128, 24},    {89, 512, 256, 128, 24},
    {90, 2048, 1024, 128, 52}, {100, 4096, 2048, 128, 64}, {120, 512, 256, 128, 28},
};

const ArchitectureRates& rates_of(int sm) {
  const ArchitectureRates* best = &kRates[0];
  for (const auto& r : kRates) {
    if (r.sm <= sm) best = &r;
  }
  return *best;
}

// Constants of a block's life, fitted to 17570 timings of kernels of all families on 280 shapes
// (fp16) and 68 (fp32) on an H200; each shape counts alike. Fitted without a fifth of the classes
// of shapes, they chose there within 3.2% of the best on average in fp16, 2.7% to 3.8% in TF32.
constexpr double kBandwidthShare = 0.90;  // of the memory's data-sheet figure
constexpr double kMmaShare = 0.90;        // of the data-sheet rate, in the steady state of a K loop
constexpr double kWarpMmaShare = 0.60;    // mma.sync against wgmma; taken for tcgen05, too
constexpr double kTransposeBytesPerClock = 37;  // of a TF32 factor that is not contiguous along K
constexpr double kSplitElementsPerClock = 20;   // of factors for three TF32 products, one SM
constexpr double kFmaShare = 0.54;              // IEEE fp32: operands come from shared memory
constexpr double kSharedBytesPerClock = 100;    // one SM
constexpr double kLoneL2Share = 1.32;       // of the L2's bytes per clock, where few blocks draw
constexpr double kLoadLatencyUs = 0.435;    // from issuing a load of a tile to its arrival
constexpr double kWideLoadClocks = 9.7;     // per warp and load of 4 to 16 bytes a lane: cp.async
constexpr double kNarrowLoadClocks = 5.2;   // the same below 4 bytes: through registers
constexpr double kBlockClocks = 2460;       // start of a block, first tiles, end
constexpr double kWarpgroupClocks = 457;    // the same, for each four warps
constexpr double kStoreBytesPerClock = 14;  // epilogue, one SM
// The same of persistent kernels; of each tile but the last its end is hidden behind the next
// one's loads, as far as its loop is as long.
constexpr double kPersistentBlockClocks = 2570;
constexpr double kPersistentWarpgroupClocks = 1530;
constexpr double kPersistentStoreBytesPerClock = 28;
constexpr double kTileEndClocks = 810;
constexpr double kTileEndBytesPerClock = 37;
constexpr double kMatrixBiasClocks = 1650;  // epilogue with a matrix C: masked loads
constexpr double kArriveClocks = 1300;  // split-K: fence, atomic, and the wait of the last block
constexpr double kSliceElementClocks = 26.5;  // split-K: a thread stores one partial sum
// Split-K: the last block reads the partial sums of all slices, several slices at a time.
constexpr double kSliceBytesPerClock = 60;
constexpr double kSliceLatencyClocks = 750;  // of the L2, for those that are read together
// Outer products, whose operands go straight to registers: clocks of an SM for each line of B that
// a warp loads and each element of A, the share of the multipliers' rate that is left, a block's
// start and end without a pipeline to fill, and the bytes of Y that leave. Not fitted.
constexpr double kLineClocks = 1.5;
constexpr double kRegisterFmaShare = 0.8;
constexpr double kShallowBlockClocks = 1300;
constexpr double kShallowStoreBytesPerClock = 28;
constexpr double kUntimedCaution = 1.1;  // of a kernel that has no timing among those that have one

// A convolution, counted in its code: instructions of a warp for each element of X a lane and for
// each step beside them, of which an SM issues four a clock. Pixels come from caches, mostly.
constexpr double kPixelInstructions = 8, kConvStepInstructions = 75;
constexpr double kPixelLatencyUs = 0.3;

double conv_issue_clocks(const mp_kernel& k) {
  const double pixels = double(k.bn) * k.bk / 32 * kPixelInstructions;
  const double w_bytes = k.align_a < 4 ? double(k.bm) * k.bk * element_bytes(k.dtype) : 0;
  return (pixels + k.warps * kConvStepInstructions) / 4 +
         w_bytes / k.align_a / 32 * kNarrowLoadClocks;
}

// A depthwise kernel, counted in its code too: instructions of a thread for each of its outputs at
// a tap and beside them; clocks of a row of taps whose loads nothing hides, and of a block's start
// and end. An SM issues the instructions of four warps a clock.
constexpr double kTapInstructions = 9, kUnrolledTapInstructions = 7, kOutputInstructions = 24;
constexpr double kTapRowClocks = 60, kDepthwiseBlockClocks = 2100;
constexpr double kLanesPerClock = 128;

// What limits a K step are queues one behind the other: near a tie neither hides the other fully.
double smooth_max(std::initializer_list<double> limits) {
  double sum = 0;
  for (double limit : limits) sum += limit * limit * limit;
  return std::cbrt(sum);
}

// One warpgroup of a persistent kernel does nothing but load, another one nothing but split
// factors.
int multiplying_warps(const mp_kernel& k) {
  return k.persistent ? k.warps - (k.tf32x3 ? 8 : 4) : k.warps;
}

// Split-K: the time in which a block stores its partial tile.
double store_slice_clocks(const mp_kernel& k) {
  return kSliceElementClocks * k.bm * k.bn / (32 * multiplying_warps(k));
}

// The time in which the last block adds up one slice. As many are being loaded as the shared memory
// of the K loop holds, and at least two, or four of few sums; persistent kernels and convolutions
// load one after the other.
double add_slice_clocks(const mp_kernel& k) {
  if (k.persistent || is_convolution(k)) return store_slice_clocks(k);
  const double slice = double(k.bm) * k.bn * sizeof(float);
  const double loop = double(k.stages - 1) * (k.bm + k.bn) * k.bk * element_bytes(k.dtype);
  const double at_once = std::clamp(std::floor(loop / slice), slice <= 16384 ? 4.0 : 2.0, 12.0);
  return slice / kSliceBytesPerClock + kSliceLatencyClocks / at_once;
}

// Whether products are multiplied on the scalar units whatever their dtype.
bool is_scalar(const mp_kernel& k) {
  return k.family == MP_GEMM_DOT || k.family == MP_GEMM_SHALLOW || k.family == MP_GEMV;
}

// All of K, for an outer product: a warp has all columns of its rows.
double shallow_clocks(const mp_kernel& k, const DeviceModel& model, int resident, double l2_bytes) {
  const int bytes = element_bytes(k.dtype);
  const double multiply = double(k.bm) * k.bn * k.bk / (model.fma_f32 * kRegisterFmaShare);
  const double b_loads = k.trans_b ? k.bn / 32.0 : std::ceil(k.bn * bytes / double(kLineBytes));
  const double loads = k.bk * (k.bm + k.warps * b_loads) * kLineClocks;
  const double operands = double(k.bm + k.bn) * k.bk * bytes;
  return smooth_max({resident * multiply, resident * loads, resident * operands / l2_bytes,
                     kLoadLatencyUs * model.clocks_per_us});
}

// Clocks of a step of a depthwise kernel, which is a tap, or an unrolled row of them.
double depthwise_step_clocks(const mp_kernel& k, int resident) {
  const double taps = k.bk > 1 ? k.bk * kUnrolledTapInstructions : kTapInstructions;
  return std::max(resident * taps * k.bm * k.bn / kLanesPerClock, kTapRowClocks);
}

// Clocks of one K step when `resident` blocks share an SM and the L2 hands it `l2_bytes` a clock.
double step_clocks(const mp_kernel& k, const DeviceModel& model, int resident, double l2_bytes) {
  if (k.family == MP_GEMM_SHALLOW) return shallow_clocks(k, model, resident, l2_bytes);
  if (is_depthwise(k)) return depthwise_step_clocks(k, resident);
  const int bytes = element_bytes(k.dtype);
  const double a_bytes = double(k.bm) * k.bk * bytes, b_bytes = double(k.bn) * k.bk * bytes;

  // Rows on the side that the instruction lays out over warps: the transposed tile swaps them.
  const int rows = k.swap ? k.bn : k.bm, columns = k.swap ? k.bm : k.bn;
  const bool dot = is_scalar(k);
  const bool fma = dot || (k.dtype == MP_F32 && k.precision == MP_IEEE && !k.tf32x3);
  // wgmma (sm_90) and tcgen05 (sm_100) read their operands from shared memory themselves.
  const bool wide_unit = model.sm == 90 || model.sm == 100;
  const bool warpgroup = wide_unit && !fma && rows >= 64 && k.warps >= 4;
  double rate = fma                 ? model.fma_f32 * kFmaShare
                : k.dtype == MP_F32 ? model.mma_tf32 * kMmaShare
                                    : model.mma_f16 * kMmaShare;
  if (wide_unit && !fma && !warpgroup) rate *= kWarpMmaShare;
  double multiply = double(rows) * columns * k.bk * (k.tf32x3 ? 3 : 1) / rate;
  if (k.tf32x3) {
    // A persistent kernel splits beside its products.
    if (!k.persistent) multiply += (double(rows) + columns) * k.bk / kSplitElementsPerClock;
  } else if (warpgroup && k.dtype == MP_F32 && (k.trans_a || !k.trans_b)) {
    // wgmma reads TF32 from shared memory along K only: the factor that is stored the other way
    // goes through registers first.
    multiply += double(rows) * k.bk * bytes / kTransposeBytesPerClock;
  }

  // Where warps read their operands from shared memory, each does for its part of the tile; wgmma's
  // reads keep pace with its arithmetic.
  double shared = 0;
  if (dot) {
    shared = 2 * (a_bytes + b_bytes);
  } else if (!warpgroup) {
    const int across = std::max(1, static_cast<int>(std::sqrt(double(k.warps))));
    shared = a_bytes * (1 + across) + b_bytes * (1 + (k.warps + across - 1) / across);
  } else if (k.tf32x3) {
    // Three products with 64 rows each read the right factor; it and the left one are written, read
    // once to be split, and the right one's lower part is written.
    const double right_bytes = k.swap ? a_bytes : b_bytes;
    shared = right_bytes * (3.0 * rows / 64 + 1) + 2 * (a_bytes + b_bytes);
  }

  // One load instruction per `align` bytes and lane. Below 4 bytes there is no asynchronous copy:
  // the K loop is not pipelined, and the latency comes on top.
  double issue = 0, latency = kLoadLatencyUs * model.clocks_per_us;
  bool pipelined = true;
  if (!uses_tensor_maps(k.family)) {
    const auto clocks = [](double tile_bytes, int align) {
      return tile_bytes / align / 32 * (align < 4 ? kNarrowLoadClocks : kWideLoadClocks);
    };
    issue = clocks(a_bytes, k.align_a) + clocks(b_bytes, k.align_b);
    pipelined = k.align_a >= 4 && k.align_b >= 4;
  }
  latency = pipelined ? latency / std::max(1, k.stages - 1) : latency + issue;
  if (is_convolution(k)) {  // loaded a step ahead
    issue = conv_issue_clocks(k);
    latency = kPixelLatencyUs * model.clocks_per_us;
  }
  return smooth_max({resident * multiply, resident * shared / kSharedBytesPerClock,
                     resident * (a_bytes + b_bytes) / l2_bytes, resident * issue, latency});
}

}  // namespace

int blocks_per_sm(const mp_kernel& k, const mp_device& d) {
  // 1 KB of shared memory per block is the system's; registers are allocated per warp in units of
  // 256.
  const int shared = k.shared_bytes + 1024;
  const int warp_registers = (std::max(k.registers, 16) * 32 + 255) / 256 * 256;
  if (k.shared_bytes > d.shared_per_block || k.warps * 32 > d.threads_per_sm) return 0;
  return std::min({d.shared_per_sm / shared, d.registers_per_sm / (warp_registers * k.warps),
                   d.threads_per_sm / (k.warps * 32), d.blocks_per_sm});
}

KernelTraits::KernelTraits(const mp_kernel& k)
    : bm(k.bm),
      bn(k.bn),
      bk(k.bk),
      group_m(k.group_m),
      warps(static_cast<int16_t>(k.warps)),
      family(static_cast<int8_t>(k.family)),
      dtype(static_cast<int8_t>(k.dtype)),
      precision(static_cast<int8_t>(k.precision)),
      trans_a(static_cast<int8_t>(k.trans_a)),
      trans_b(static_cast<int8_t>(k.trans_b)),
      align_a(static_cast<int8_t>(k.align_a)),
      align_b(static_cast<int8_t>(k.align_b)),
      align_c(static_cast<int8_t>(k.align_c)),
      split_k(k.split_k != 0),
      persistent(k.persistent != 0),
      sliced(k.sliced != 0),
      pingpong(k.pingpong != 0),
      bias_matrix(k.bias_matrix != 0),
      dependent_launch(k.dependent_launch != 0),
      swap(k.swap != 0),
      tensor_maps(uses_tensor_maps(k.family)) {}

DeviceModel::DeviceModel(const mp_device& device, const mp_table* table) {
  const ArchitectureRates& rates = rates_of(device.sm);
  sm = device.sm;
  sm_count = std::max(1, device.sm_count);
  clocks_per_us = std::max(1, device.clock_mhz);
  // MHz * bytes = bytes per microsecond; two transfers per memory clock.
  const double peak = device.bandwidth_gbps > 0
                          ? device.bandwidth_gbps * 1e3
                          : 2.0 * device.memory_clock_mhz * device.memory_bus_bits / 8;
  bytes_per_us = table && table->bandwidth_gbps > 0 ? table->bandwidth_gbps * 1e3
                                                    : std::max(peak, 1e4) * kBandwidthShare;
  launch_us = table && table->launch_us > 0 ? table->launch_us : 1.0;
  l2_bytes_per_clock = rates.l2_bytes;
  l2_bytes = static_cast<double>(device.l2_bytes);
  mma_f16 = rates.f16;
  mma_tf32 = rates.tf32;
  fma_f32 = rates.f32;
}

namespace {

KernelCost derived_cost(const mp_kernel& k, const mp_device& device, const DeviceModel& model) {
  KernelCost cost{};
  cost.kernel = KernelTraits(k);
  cost.blocks_per_sm = static_cast<int16_t>(blocks_per_sm(k, device));
  cost.legal = cost.blocks_per_sm > 0;
  if (!cost.legal) return cost;
  const double bytes = double(k.bm) * k.bn * element_bytes(k.dtype);
  // Of dot products the sum over their warps: once, whatever their number.
  const bool dot = k.family == MP_GEMM_DOT || k.family == MP_GEMV;
  const double warpgroups = dot ? 1 : multiplying_warps(k) / 4.0;
  double fixed = k.persistent
                     ? kPersistentBlockClocks + kPersistentWarpgroupClocks * warpgroups +
                           bytes / kPersistentStoreBytesPerClock
                     : kBlockClocks + kWarpgroupClocks * warpgroups + bytes / kStoreBytesPerClock;
  if (k.family == MP_GEMM_SHALLOW) fixed = kShallowBlockClocks + bytes / kShallowStoreBytesPerClock;
  if (is_depthwise(k)) {
    fixed = kDepthwiseBlockClocks + double(k.bm) * k.bn * kOutputInstructions / kLanesPerClock;
  }
  if (k.bias_matrix && !dot) fixed += kMatrixBiasClocks;
  if (k.family == MP_GEMM_TMA_MASKED) {  // an element a lane and store
    fixed += double(k.bm) * k.bn / 32 * kNarrowLoadClocks;
  }
  if (k.split_k) fixed += store_slice_clocks(k);
  const double l2 = model.l2_bytes_per_clock, clocks = model.clocks_per_us;
  cost.fixed_us = fixed / clocks;
  cost.step_us = step_clocks(k, model, cost.blocks_per_sm, l2) / clocks;
  cost.single_step_us = step_clocks(k, model, 1, l2 * kLoneL2Share) / clocks;
  cost.arrive_us = kArriveClocks / clocks;
  cost.slice_us = add_slice_clocks(k) / clocks;
  cost.early = is_always_early(cost.kernel);
  if (k.persistent) {
    cost.tile_end_us =
        cost.blocks_per_sm * (kTileEndClocks + bytes / kTileEndBytesPerClock) / clocks;
    cost.hidden_us = cost.single_step_us;
  }
  return cost;
}

void take(const mp_cost& measured, KernelCost* cost) {
  cost->measured = true;
  cost->blocks_per_sm =
      static_cast<int16_t>(std::clamp(std::lround(measured.blocks_per_sm), 1L, 1024L));
  cost->fixed_us = measured.fixed_us;
  cost->step_us = measured.step_us;
  cost->single_step_us = measured.single_step_us > 0 ? measured.single_step_us : measured.step_us;
}

// How much of what decides a kernel's speed two kernels share; below 0: nothing, since products are
// tuned apart from convolutions.
int likeness(const mp_kernel& a, const mp_kernel& b) {
  if (is_convolution(a) != is_convolution(b) || is_depthwise(a) != is_depthwise(b)) return -1;
  if (a.family != b.family) return 0;
  const bool same_arithmetic =
      element_bytes(a.dtype) == element_bytes(b.dtype) &&
      (a.dtype != MP_F32 || (a.precision == b.precision && a.tf32x3 == b.tf32x3));
  if (!same_arithmetic) return 1;
  return a.trans_a == b.trans_a && a.trans_b == b.trans_b ? 3 : 2;
}

// Geometric means over kernels of measured / derived.
struct Calibration {
  int kernels = 0;
  double fixed = 0, step = 0, single_step = 0;  // sums of logarithms

  void add(const KernelCost& measured, const KernelCost& derived) {
    ++kernels;
    fixed += std::log(measured.fixed_us / derived.fixed_us);
    step += std::log(measured.step_us / derived.step_us);
    single_step += std::log(measured.single_step_us / derived.single_step_us);
  }

  void apply(KernelCost* derived) const {
    derived->fixed_us *= kUntimedCaution * std::exp(fixed / kernels);
    derived->step_us *= kUntimedCaution * std::exp(step / kernels);
    derived->single_step_us *= kUntimedCaution * std::exp(single_step / kernels);
  }
};

}  // namespace

std::vector<KernelCost> kernel_costs(const mp_kernel* kernels, int count, const mp_device& device,
                                     const DeviceModel& model, const mp_cost* measured) {
  std::vector<KernelCost> derived, costs;
  for (int i = 0; i < count; ++i) derived.push_back(derived_cost(kernels[i], device, model));
  costs = derived;
  for (int i = 0; measured && i < count; ++i) {
    if (measured[i].blocks_per_sm < 0) costs[i].legal = false, costs[i].excluded = true;
    if (costs[i].legal && measured[i].step_us > 0 && measured[i].fixed_us > 0) {
      take(measured[i], &costs[i]);
    }
  }
  for (int i = 0; measured && i < count; ++i) {
    if (costs[i].measured) continue;
    Calibration by_likeness[4];
    for (int j = 0; j < count; ++j) {
      const int like = costs[j].measured ? likeness(kernels[i], kernels[j]) : -1;
      if (like >= 0) by_likeness[like].add(costs[j], derived[j]);
    }
    for (int like = 3; like >= 0; --like) {
      if (by_likeness[like].kernels == 0) continue;
      by_likeness[like].apply(&costs[i]);
      break;
    }
  }
  for (KernelCost& cost : costs) {
    if (cost.legal) set_bounds(model, &cost);
  }
  return costs;
}

}  // namespace moonpoly
