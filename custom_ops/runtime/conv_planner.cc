#include "conv_planner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "conv_shape.h"
#include "error.h"
#include "pack.h"
#include "stats.h"

namespace moonpoly {
namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of a one-dimensional grid
constexpr int64_t kMaxWorkspace = int64_t{256} << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int taps_of(const mp_kernel& k) {
  return k.family == MP_CONV_TAPS4 ? 4 : k.family == MP_CONV_TAPS8 ? 8 : 1;
}

double unique_bytes(const mp_conv& c) {
  const double in = double(c.c) * c.in[0] * c.in[1] * c.in[2];
  const double images = double(c.n) * c.groups;
  const double weights = double(c.groups) * c.k * c.c * kernel_taps(c);
  return (images * (in + double(c.k) * out_pixels(c)) + weights) * element_bytes(c.dtype);
}

Extent extent_of(const mp_kernel& k, const mp_conv& c) {
  Extent extent{};
  extent.m = conv_rows(k, c), extent.n = conv_images(k, c) * out_pixels(c);
  extent.batch = conv_entries(k, c);
  extent.k = conv_steps(k, c) * k.bk;
  extent.unique_bytes = unique_bytes(c);
  extent.element_bytes = element_bytes(c.dtype);
  const double pixels = double(c.in[0]) * c.in[1] * c.in[2] / std::max<int64_t>(out_pixels(c), 1);
  extent.b_distinct = std::min(1.0, c.c * pixels / std::max<int64_t>(extent.k, 1));
  return extent;
}

}  // namespace

int64_t conv_rows(const mp_kernel& k, const mp_conv& c) {
  return is_depthwise(k) ? c.groups * c.k : c.k;
}

int64_t conv_entries(const mp_kernel& k, const mp_conv& c) {
  return is_depthwise(k) ? c.n : c.groups;
}

int64_t conv_images(const mp_kernel& k, const mp_conv& c) { return is_depthwise(k) ? 1 : c.n; }

int64_t conv_steps(const mp_kernel& k, const mp_conv& c) {
  if (is_depthwise(k)) return c.kernel[0] * c.kernel[1] * (k.bk > 1 ? 1 : c.kernel[2]);
  const int taps = taps_of(k);
  return ceil_div(c.c, std::max(k.bk / taps, 1)) * ceil_div(c.kernel[2], taps) * c.kernel[1] *
         c.kernel[0];
}

const char* conv_refusal(const mp_kernel& k, const mp_conv& c) {
  if (!is_convolution(k)) return "it computes matrix products";
  if (k.dtype != c.dtype) return "it has another dtype";
  if (!computes_in(k, c.dtype, c.precision)) return "it has another precision";
  const bool transposed =
      k.family == MP_CONV_TRANSPOSED || k.family == MP_CONV_DEPTHWISE_TRANSPOSED;
  if (transposed != (c.transposed != 0)) {
    return transposed ? "it computes transposed convolutions" : "the convolution is transposed";
  }
  if (is_depthwise(k)) {
    if (c.c != 1) return "a group has more than one channel";
    return k.bk == 1 || k.bk == c.kernel[2] ? nullptr : "it is for another width of the kernel";
  }
  if (k.align_a < 16) return nullptr;
  if (c.w_taps != taps_of(k)) return "W is not stored the way it loads it";
  // In all images that a tile meets it addresses the channels of a K step, and a row of Y, in 32
  // bits.
  constexpr int64_t kReach = int64_t{1} << 31;
  const int64_t channel = c.in[0] * c.in[1] * c.in[2];
  if (channel * (k.bk + 1) >= kReach) return "a channel of X has too many pixels for it";
  const int64_t pixels = std::max<int64_t>(out_pixels(c), 1);
  const int64_t further = std::min((pixels + k.bn - 2) / pixels, std::max<int64_t>(c.n - 1, 0));
  const double in_x = double(further) * c.groups * c.c * channel + double(channel) * (k.bk + 1);
  const double in_y = double(further + 1) * c.groups * c.k * pixels;
  if (further > 0 && std::max(in_x, in_y) >= kReach) return "a tile of it meets images too large";
  return nullptr;
}

ConvPlanner::ConvPlanner(const Pack& pack, std::shared_ptr<const Planner> planner)
    : pack_(pack), planner_(std::move(planner)) {}

void ConvPlanner::consider(int index, const mp_conv& c, const PlanRequest& request,
                           Choice* best) const {
  const mp_kernel& k = pack_.kernel(index);
  const KernelCost& cost = planner_->cost(index);
  const DeviceModel& model = planner_->model();
  const Extent extent = extent_of(k, c);
  const int64_t tile_rows = ceil_div(extent.m, k.bm);
  const int64_t tiles = tile_rows * ceil_div(extent.n, k.bn);
  const int64_t steps = conv_steps(k, c);
  const auto offer = [&](int split, double us) {
    if (tile_rows * ceil_div(out_pixels(c), k.bn) * split > kMaxBlocks) return;
    // A tie, as of lone waves of small images, goes to fewer blocks.
    const int64_t blocks = tiles * split;
    if (best->kernel < 0 || us < best->us || (us == best->us && blocks < best->blocks)) {
      *best = Choice{index, split, blocks, us, cost.measured};
    }
  };
  const Tiling tiling(cost.kernel, extent);
  if (!k.split_k) {
    if (request.only_split <= 1) offer(1, predict_us(cost, model, extent, tiling, 1));
    return;
  }
  if (!request.workspace || request.only_split == 1) return;
  const int64_t all_tiles = tiles * extent.batch;
  const int64_t slots = int64_t{model.sm_count} * cost.blocks_per_sm;
  const int64_t tile_bytes = int64_t{k.bm} * k.bn * static_cast<int64_t>(sizeof(float));
  const auto try_split = [&](int64_t split) {
    if (split < 2 || split > steps || split > (int64_t{1} << 20)) return;
    const int slices = static_cast<int>(split);
    offer(slices, predict_us(cost, model, extent, tiling, slices));
  };
  if (request.only_split > 1) {
    try_split(request.only_split);
    return;
  }
  for (int64_t wanted : {2, 3, 4, 6, 8, 12, 16, 24, 32, 64}) {
    if (all_tiles * wanted > 2 * slots || all_tiles * wanted * tile_bytes > kMaxWorkspace) break;
    // The smallest split with the same steps per slice: none is left without work.
    if (wanted <= steps) try_split(ceil_div(steps, ceil_div(steps, wanted)));
  }
}

ConvPlanner::Choice ConvPlanner::choose(const mp_conv& c, const PlanRequest& request) const {
  Choice best;
  if (request.only_kernel >= 0) {
    if (request.only_kernel >= pack_.kernel_count()) {
      fail(MP_INVALID, "kernel ", request.only_kernel, " does not exist; the pack holds ",
           pack_.kernel_count());
    }
    const mp_kernel& k = pack_.kernel(request.only_kernel);
    if (const char* why = conv_refusal(k, c)) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " cannot run this convolution: ", why);
    }
    if (planner_->cost(request.only_kernel).excluded) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " is excluded on ", planner_->device().name,
           " by its performance table: it was wrong there, or others are faster; tune again to "
           "have it back");
    }
    if (!planner_->cost(request.only_kernel).legal) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " does not fit ", planner_->device().name);
    }
    consider(request.only_kernel, c, request, &best);
    if (best.kernel < 0) {
      fail(MP_INVALID, "kernel ", k.name, " cannot cut ", conv_steps(k, c), " K steps into ",
           request.only_split, " slices (0: any): it takes ", k.split_k ? "2 and more" : "1");
    }
    return best;
  }
  for (int index : pack_.convolutions()) {
    if (!planner_->cost(index).legal || conv_refusal(pack_.kernel(index), c)) continue;
    consider(index, c, request, &best);
  }
  if (best.kernel < 0) {
    static const char* const dtypes[] = {"fp16", "bf16", "fp32"};
    fail(MP_NO_KERNEL, "kernel pack '", pack_.path(), "' has no kernel for a ",
         c.transposed ? "transposed " : "", "convolution in ", dtypes[c.dtype],
         c.dtype == MP_F32 ? (c.precision == MP_IEEE ? " (ieee)" : " (tf32)") : "", " of ", c.c,
         " to ", c.k, " channels in ", c.groups, " groups, split ", request.only_split, " on ",
         planner_->device().name);
  }
  return best;
}

void ConvPlanner::plan(const mp_conv& c, const PlanRequest& request, mp_plan* out) const {
  check_conv(c);
  std::memset(out, 0, sizeof *out);
  const int64_t pixels = out_pixels(c);
  if (c.n == 0 || c.k == 0 || pixels == 0) return;
  const Choice choice = choose(c, request);
  out->measured = choice.measured;
  const mp_kernel& k = pack_.kernel(choice.kernel);
  const int64_t rows = conv_rows(k, c), entries = conv_entries(k, c), images = conv_images(k, c);
  const int64_t tile_rows = ceil_div(rows, k.bm);
  // As many entries, or else images of all entries, as a grid holds at once.
  const int64_t of_image = tile_rows * ceil_div(pixels, k.bn) * choice.split;
  const int64_t entries_at_once = std::min(entries, kMaxBlocks / of_image);
  const int64_t tile_columns = kMaxBlocks / (entries_at_once * tile_rows * choice.split);
  const int64_t columns = std::min(tile_columns * k.bn, kMaxConvColumns);
  const int64_t images_at_once = std::min(images, columns / pixels);
  for (int64_t image = 0; image < images; image += images_at_once) {
    for (int64_t z = 0; z < entries; z += entries_at_once) {
      if (out->region_count == MP_MAX_REGIONS) {
        fail(MP_INVALID, "an output of ", c.n, " x ", c.groups * c.k, " x ", pixels,
             " needs more than ", MP_MAX_REGIONS, " launches");
      }
      mp_region& r = out->regions[out->region_count++];
      r.kernel = choice.kernel;
      r.split = choice.split;
      r.m = rows;
      r.n0 = image * pixels;
      r.n = std::min(images_at_once, images - image) * pixels;
      r.z0 = z;
      r.z = std::min(entries_at_once, entries - z);
      const int64_t tiles = r.z * tile_rows * ceil_div(r.n, k.bn);
      r.grid = tiles * choice.split;
      if (choice.split > 1) {
        r.workspace_bytes = r.grid * k.bm * k.bn * static_cast<int64_t>(sizeof(float));
        r.counters = tiles;
      }
      r.predicted_us = choice.us * (double(r.z) / entries) * (double(r.n) / (images * pixels));
      out->workspace_bytes = std::max(out->workspace_bytes, r.workspace_bytes);
      out->counters = std::max(out->counters, r.counters);
      out->predicted_us += r.predicted_us;
    }
  }
}

std::shared_ptr<const PlannedConv> ConvPlanner::planned(const mp_conv& c, unsigned uses) const {
  if (auto known = memory_.find(c, uses)) {
    stats().plan_hits.fetch_add(1, std::memory_order_relaxed);
    return known;
  }
  const auto start = std::chrono::steady_clock::now();
  auto fresh = std::make_shared<PlannedConv>();
  fresh->problem = c;
  fresh->uses = uses;
  PlanRequest request;
  request.workspace = uses & kUsesWorkspace;
  plan(c, request, &fresh->plan);
  const auto elapsed = std::chrono::steady_clock::now() - start;
  stats().add_miss(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
  memory_.insert(fresh);
  return fresh;
}

}  // namespace moonpoly
