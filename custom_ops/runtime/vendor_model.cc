#include "vendor_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "error.h"
#include "pack.h"
#include "planner.h"
#include "vendor.h"

namespace moonpoly {
namespace {

// The library takes the host longer than a launch of ours. In sessions on an H200 a node of its got
// no faster than 9.4 us, however small; one of ours took that long with 7.5 us on the GPU.
constexpr double kHostUs = 7.5;
constexpr int kStep = 64;  // elements of K
constexpr int kMaxSlices = 16;
constexpr double kArea = 64 * 64;  // elements that areas of tiles are counted in

// Of what is not negative. Calls of floor and ceil, which need more than x86-64's first
// instructions, would take half of a prediction's time.
double whole(double x) { return static_cast<double>(static_cast<int64_t>(std::min(x, 1e18))); }
double ceil_div(double a, double b) { return whole((a + b - 1) / b); }  // of whole numbers

double tile_us(const mp_vendor_cost& c, const mp_vendor_tile& tile, double k_steps, double tiles,
               double traffic, double sms, double split) {
  const double area = tile.bm * tile.bn / kArea;
  const double steps = ceil_div(k_steps, split);
  const double waves = tiles * split / sms, full = whole(waves), last = waves - full;
  const double share = full + (last > 0 ? c.lone_share + (1 - c.lone_share) * last : 0);
  const double loop = steps * tile.step_us * share;
  double us = c.fixed_us + c.epilogue_us * (full + (last > 0)) * area +
              std::sqrt(loop * loop + traffic * traffic);
  if (split > 1) us += c.split_us + c.slice_us * split * area;
  return us;
}

int class_index(int dtype, int precision, int trans_a, int trans_b, bool aligned, bool batched) {
  return ((((dtype * 2 + precision) * 2 + trans_a) * 2 + trans_b) * 2 + aligned) * 2 + batched;
}

// Where a problem lies among the nodes.
struct Place {
  int node[8];
  double share[8];

  explicit Place(const Extent& e) {
    constexpr double kFirst[] = {0, 3, 3};
    const double sizes[] = {double(e.m), double(e.n), double(e.k)};
    int low[3];
    double weight[3];
    for (int i = 0; i < 3; ++i) {
      const double at = (std::log2(sizes[i]) - kFirst[i]) / MP_VENDOR_NODE_STEP;
      low[i] = std::max(0, std::min(MP_VENDOR_NODES - 2, static_cast<int>(at)));
      weight[i] = std::max(0.0, std::min(1.0, at - low[i]));
    }
    for (int corner = 0; corner < 8; ++corner) {
      node[corner] = 0;
      share[corner] = 1;
      for (int i = 0; i < 3; ++i) {
        const int high = corner >> i & 1;
        node[corner] = node[corner] * MP_VENDOR_NODES + low[i] + high;
        share[corner] *= high ? weight[i] : 1 - weight[i];
      }
    }
  }
};

double factor(const mp_log_factors& c, const mp_problem& p, const Place& place) {
  double log = 0;
  const int32_t aligns[] = {p.align_a, p.align_b, p.align_c};
  for (int i = 0; i < 3; ++i) {
    if (aligns[i] < 16) log += c.misaligned[i][aligns[i] == 2 ? 0 : aligns[i] == 4 ? 1 : 2];
  }
  for (int i = 0; i < 8; ++i) log += place.share[i] * c.nodes[place.node[i]];
  return std::exp(log);
}

// No `factor` is above it.
double most_factor(const mp_log_factors& c) {
  double log = *std::max_element(std::begin(c.nodes), std::end(c.nodes));
  for (const auto& operand : c.misaligned) {
    log += std::max(0.0f, *std::max_element(std::begin(operand), std::end(operand)));
  }
  return std::exp(log) * (1 + 1e-9);  // for what rounding adds
}

bool finite(const mp_log_factors& c) {
  const auto is_finite = [](float log) { return std::isfinite(log); };
  return std::all_of(&c.misaligned[0][0], &c.misaligned[0][0] + 9, is_finite) &&
         std::all_of(std::begin(c.nodes), std::end(c.nodes), is_finite);
}

}  // namespace

const char* fault(const mp_vendor_cost& c) {
  const auto positive = [](float value) { return value > 0 && std::isfinite(value); };
  const auto usable = [](float value) { return value >= 0 && std::isfinite(value); };
  if (c.dtype < MP_F16 || c.dtype > MP_F32 || c.precision < MP_TF32 || c.precision > MP_IEEE ||
      ((c.trans_a | c.trans_b | c.aligned | c.batched) & ~1)) {
    return "has an unknown class of problems";
  }
  if (c.tile_count < 1 || c.tile_count > MP_VENDOR_TILES) return "has too few or too many tiles";
  for (int i = 0; i < c.tile_count; ++i) {
    const mp_vendor_tile& tile = c.tiles[i];
    if (tile.bm < 1 || tile.bm > 1024 || tile.bn < 1 || tile.bn > 1024 || !positive(tile.step_us)) {
      return "has an impossible tile";
    }
  }
  if (!positive(c.bandwidth_gbps) || !positive(c.margin) || !usable(c.fixed_us) ||
      !usable(c.epilogue_us) || !usable(c.split_us) || !usable(c.slice_us) ||
      !usable(c.lone_share)) {
    return "has a cost that is not finite or negative";
  }
  if (!finite(c.correction) || !finite(c.promise)) return "has a factor that is not finite";
  return nullptr;
}

VendorModel::VendorModel(const mp_vendor_cost* costs, int count, const DeviceModel& device)
    : costs_(costs, costs + count), sm_count_(device.sm_count) {
  for (int i = 0; i < count; ++i) {
    const mp_vendor_cost& c = costs[i];
    most_promise_.push_back(most_factor(c.promise));
    places_[class_index(c.dtype, c.precision, c.trans_a, c.trans_b, c.aligned, c.batched)] =
        static_cast<int16_t>(i + 1);
  }
}

bool VendorModel::may_win(const mp_vendor_cost& c, double promised_us) const {
  return kHostUs * c.margin < promised_us * most_promise_[&c - costs_.data()];
}

const mp_vendor_cost* VendorModel::cost_of(const mp_problem& p) const {
  const int32_t precision = p.dtype == MP_F32 ? p.precision : MP_TF32;
  const bool aligned = std::min({p.align_a, p.align_b, p.align_c}) == 16;
  const int place =
      places_[class_index(p.dtype, precision, p.trans_a, p.trans_b, aligned, p.batch > 1)];
  return place ? &costs_[place - 1] : nullptr;
}

VendorModel::Comparison VendorModel::compare(const mp_vendor_cost& c, const mp_problem& p,
                                             const Extent& e, bool split,
                                             double promised_us) const {
  const double traffic = e.unique_bytes / (c.bandwidth_gbps * 1e3);
  const double k_steps = ceil_div(e.k, kStep);
  const double most = std::min<double>(kMaxSlices, k_steps);
  double best = -1;
  for (int i = 0; i < c.tile_count; ++i) {
    const mp_vendor_tile& tile = c.tiles[i];
    const double tiles = ceil_div(e.m, tile.bm) * ceil_div(e.n, tile.bn) * e.batch;
    const auto offer = [&](double slices) {
      const double us = tile_us(c, tile, k_steps, tiles, traffic, sm_count_, slices);
      if (best < 0 || us < best) best = us;
    };
    offer(1);
    if (!split || 2 * tiles > sm_count_) continue;
    const double fill = std::min(whole(sm_count_ / tiles), most);
    if (fill >= 2) offer(fill);
    if (fill >= 4) offer(whole(fill / 2));
  }
  const Place place(e);
  return {best * factor(c.correction, p, place), promised_us * factor(c.promise, p, place)};
}

void Planner::plan_vendor(const mp_problem& p, const PlanRequest& request, mp_plan* out) const {
  const bool forced = request.only_kernel == MP_VENDOR;
  if (!forced && (!offers_vendor_ || (request.flags & MP_PLAN_NO_VENDOR))) return;
  const char* why = vendor_refusal(p);
  if (forced && why) fail(MP_NO_KERNEL, "cuBLASLt cannot run this problem: ", why);
  if (forced && request.only_split > 1) {
    fail(MP_INVALID, "cuBLASLt cuts K as it sees fit, not into ", request.only_split,
         " slices; leave the split at 0");
  }
  const mp_vendor_cost* cost = vendor_.cost_of(p);
  if (why || (!forced && (!cost || !vendor_.may_win(*cost, out->predicted_us)))) return;
  mp_region whole{};
  whole.m = p.m;
  whole.n = p.n;
  whole.z = p.batch;
  const Extent extent = extent_of(p, whole);
  double us = 0;  // not known
  if (cost) {
    const auto likely = vendor_.compare(*cost, p, extent, request.workspace, out->predicted_us);
    us = likely.vendor_us;
    if (!forced && std::max(us, kHostUs) * cost->margin >= likely.other_us) return;
  }
  *out = mp_plan{};
  mp_region& r = out->regions[0];
  r.kernel = MP_VENDOR;
  r.split = 1;
  r.m = p.m, r.n = p.n, r.z = p.batch;
  r.grid = 1;
  r.workspace_bytes = request.workspace ? kVendorWorkspace + kVendorAlignment : 0;
  r.predicted_us = us;
  out->region_count = 1;
  out->measured = cost != nullptr;
  out->workspace_bytes = r.workspace_bytes;
  out->predicted_us = us;
}

}  // namespace moonpoly
