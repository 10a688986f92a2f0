#include "planner.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "error.h"
#include "op_structure.h"
#include "pack.h"
#include "packing.h"
#include "regions.h"
#include "stats.h"

namespace moonpoly {
namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;                 // of a one-dimensional grid
constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1024;  // of a region; keeps every alignment
constexpr int64_t kMaxK = (int64_t{1} << 31) - 512;  // a kernel rounds K up to its step in i32
constexpr int64_t kMaxBatch = (int64_t{1} << 31) - 512;
constexpr int64_t kMaxWorkspace = int64_t{256} << 20;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;  // of a tensor map
constexpr int kMaxSplit = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest split with the same steps per slice: no slice is left without work.
int normal_split(int64_t steps, int split) {
  return static_cast<int>(ceil_div(steps, ceil_div(steps, split)));
}

int64_t stored_entries(int64_t batch, int32_t div, int32_t mod) {
  return std::min<int64_t>(mod, ceil_div(batch, div));
}

bool runs_on(int pack_sm, int device_sm) {
  // From sm_90 on Triton compiles for the architecture itself (sm_90a); before, code runs on every
  // later minor version.
  return pack_sm == device_sm ||
         (pack_sm < 90 && pack_sm / 10 == device_sm / 10 && pack_sm <= device_sm);
}

}  // namespace

Extent extent_of(const mp_problem& p, const mp_region& r) {
  const double a = double(stored_entries(r.z, p.a_div, p.a_mod)) * r.m * p.k;
  const double b = double(stored_entries(r.z, p.b_div, p.b_mod)) * p.k * r.n;
  const int bytes = element_bytes(p.dtype);
  const double columns = double(output_columns(p, r.n)) * output_bytes(p) / bytes;
  const double y = double(r.z) * r.m * columns;
  const double c = p.bias == MP_BIAS_MATRIX ? double(r.m) * r.n : 0;
  const double residual = p.residual ? y : 0;
  Extent e{};
  e.m = r.m, e.n = r.n, e.k = p.k, e.batch = r.z;
  e.unique_bytes = (a + b + c + residual + y) * bytes;
  e.element_bytes = bytes;
  e.a_crosses_lines = p.lda * bytes % kLineBytes != 0;
  e.b_crosses_lines = p.ldb * bytes % kLineBytes != 0;
  e.b_rows_short = !p.trans_b && p.ldb * bytes < kLineBytes;
  e.finish_clocks = finish_clocks(p.activation, p.residual);
  return e;
}

namespace {

// Kernels that load by pointers were compiled to believe that rows are as long as their alignment
// says, and test their masks that coarsely. Rows of a padded copy end earlier, at K: the zeros
// behind them are harmless where both operands have them there, else they meet what lies behind the
// other's.
bool believes_in_longer_rows(const KernelTraits& k, const mp_problem& p) {
  const int64_t row = p.k * element_bytes(p.dtype);
  const auto divides = [row](int64_t power) { return (row & (power - 1)) == 0; };
  const bool longer = (!p.trans_a && !divides(k.align_a)) || (p.trans_b && !divides(k.align_b));
  const bool both_padded = !p.trans_a && p.trans_b && p.align_a == 16 && p.align_b == 16;
  return longer && !both_padded;
}

}  // namespace

const char* refusal(const KernelTraits& k, const mp_problem& p) {
  if (k.family == MP_COPY_PADDED) return "it copies and computes no product";
  if (is_convolution(k.family)) return "it computes convolutions";
  if (k.dtype != p.dtype) return "it has another dtype";
  if (k.dtype == MP_F32 && k.precision != p.precision) return "it has another precision";
  if (k.trans_a != p.trans_a || k.trans_b != p.trans_b) return "it has another operand layout";
  if (p.align_a < k.align_a || p.align_b < k.align_b || p.align_c < k.align_c) {
    return "the operands are not aligned enough for it";
  }
  if (p.bias == MP_BIAS_MATRIX && !k.bias_matrix) return "it takes no matrix bias";
  if (!k.tensor_maps && believes_in_longer_rows(k, p)) {
    return "K is shorter than the padded rows of one operand";
  }
  if (k.family == MP_GEMM_SHALLOW && p.k > k.bk) return "K is longer than it is unrolled for";
  if ((p.gated || p.wide) && (k.family == MP_GEMM_SHALLOW || (k.persistent && k.swap))) {
    return "it stores Y in one way only, neither gated nor wide";
  }
  if (p.gated && k.bn % 2) return "a tile of it has not both columns of a gated output";
  if (k.tensor_maps) {
    // A tensor map has no empty dimension, and its strides have 40 bits.
    if (p.k == 0) return "K is 0";
    const int64_t widest =
        std::max({p.lda, p.ldb, p.ldc, p.a_batch_stride, p.b_batch_stride, p.c_batch_stride});
    if (widest >= (p.dtype == MP_F32 ? kMaxStrideBytes / 4 : kMaxStrideBytes / 2)) {
      return "a stride has over 40 bits";
    }
  }
  return nullptr;
}

void check_problem(const mp_problem& p) {
  if (p.dtype < MP_F16 || p.dtype > MP_F32) fail(MP_INVALID, "dtype code ", p.dtype, " is unknown");
  if (p.precision < MP_TF32 || p.precision > MP_IEEE) {
    fail(MP_INVALID, "precision code ", p.precision, " is unknown");
  }
  if ((p.trans_a | p.trans_b) & ~1) {
    fail(MP_INVALID, "trans_a = ", p.trans_a, ", trans_b = ", p.trans_b, " must be 0 or 1");
  }
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) {
    fail(MP_INVALID, "sizes m = ", p.m, ", n = ", p.n, ", k = ", p.k, ", batch = ", p.batch,
         " must not be negative");
  }
  if (p.k >= kMaxK) fail(MP_INVALID, "K = ", p.k, " is too large; it must be below ", kMaxK);
  if (p.batch >= kMaxBatch) {
    fail(MP_INVALID, "a batch of ", p.batch, " products is too large; it must be below ",
         kMaxBatch);
  }
  const auto short_pitch = [](int64_t rows, int64_t columns, int64_t pitch) {
    return rows > 1 && pitch < columns;
  };
  const int64_t a_rows = p.trans_a ? p.k : p.m, a_columns = p.trans_a ? p.m : p.k;
  const int64_t b_rows = p.trans_b ? p.n : p.k, b_columns = p.trans_b ? p.k : p.n;
  if (short_pitch(a_rows, a_columns, p.lda) || short_pitch(b_rows, b_columns, p.ldb) ||
      short_pitch(p.m, output_columns(p, p.n), p.ldc)) {
    fail(MP_INVALID, "leading dimensions lda = ", p.lda, ", ldb = ", p.ldb, ", ldc = ", p.ldc,
         " are shorter than the rows of ", a_columns, ", ", b_columns, " and ",
         output_columns(p, p.n));
  }
  if (p.a_div < 1 || p.a_mod < 1 || p.b_div < 1 || p.b_mod < 1) {
    fail(MP_INVALID, "batch maps a = (", p.a_div, ", ", p.a_mod, "), b = (", p.b_div, ", ", p.b_mod,
         ") must be at least 1");
  }
  for (int32_t bytes : {p.align_a, p.align_b, p.align_c}) {
    if (bytes < element_bytes(p.dtype) || bytes > 16 || (bytes & (bytes - 1))) {
      fail(MP_INVALID, "alignment of ", bytes,
           " bytes must be a power of two from the element size (", element_bytes(p.dtype),
           ") to 16");
    }
  }
  if (p.bias < MP_BIAS_NONE || p.bias > MP_BIAS_MATRIX) {
    fail(MP_INVALID, "bias code ", p.bias, " is unknown");
  }
  if (p.bias == MP_BIAS_VECTOR && (((p.bias_stride_m | p.bias_stride_n) & ~int64_t{1}) ||
                                   (p.bias_stride_m & p.bias_stride_n))) {
    fail(MP_INVALID, "a vector bias has strides 0 and 0, 0 and 1, or 1 and 0, got ",
         p.bias_stride_m, " and ", p.bias_stride_n);
  }
  check_epilogue(p.activation, p.residual);
  if ((p.gated | p.wide) & ~1 || p.gated & p.wide) {
    fail(MP_INVALID, "gated = ", p.gated, ", wide = ", p.wide, " must be 0 or 1, and not both 1");
  }
  if (p.gated && (p.n % 2 || p.residual)) {
    fail(MP_INVALID, "a gated product has an even n and no residual, got n = ", p.n,
         " and residual = ", p.residual);
  }
  if (p.wide && (p.dtype == MP_F32 || p.activation || p.residual)) {
    fail(MP_INVALID,
         "a wide result is of fp16 or bf16, without activation and residual, got dtype ", p.dtype,
         ", activation = ", p.activation, " and residual = ", p.residual);
  }
}

Planner::Planner(const Pack& pack, const mp_device& device)
    : pack_(pack), device_(device), model_(device, nullptr) {
  const int pack_sm = static_cast<int>(pack.header().sm);
  if (!runs_on(pack_sm, device.sm)) {
    fail(MP_BAD_PACK, "kernel pack '", pack.path(), "' holds code for sm_", pack_sm, ", but ",
         device.name, " is sm_", device.sm, "; build one with `moonpoly pack --arch sm_", device.sm,
         "`");
  }
  const mp_table* table = nullptr;
  const mp_cost* measured = pack.costs_for(device, &table);
  has_table_ = measured != nullptr;
  model_ = DeviceModel(device, table);
  costs_ = kernel_costs(&pack.kernel(0), pack.kernel_count(), device, model_, measured);
  for (int i = 0; i < pack.kernel_count(); ++i) costs_[i].joins = can_join(pack, pack.kernel(i));
  if (table) {
    vendor_ = VendorModel(pack.vendor_costs(*table), table->vendor_count, model_);
    // A catalog is for explaining and interpreting our own kernels.
    offers_vendor_ = !vendor_.empty() && !pack.is_catalog();
  }
}

void Planner::consider(int index, const Extent& e, const Tiling& tiling, const PlanRequest& request,
                       Choice* best) const {
  const KernelCost& cost = costs_[index];
  const KernelTraits& k = cost.kernel;
  const int64_t tiles = tiling.tiles, steps = tiling.steps;
  // Tiles of a warp or two answer soonest while one matrix has few of them. By the costs fitted to
  // those they would be taken for hundreds, where they reached 0.45 to 0.85 of cuBLAS's speed on an
  // H200.
  const bool lean = k.tensor_maps && k.warps <= 2 && e.batch == 1;
  if (lean && request.only_kernel < 0 && tiles > 3 * int64_t{model_.sm_count}) return;
  const auto offer = [&](int split) {
    if (tiling.rows * tiling.columns * split > kMaxBlocks) return;
    if (k.group_m * tiling.columns > kMaxBlocks) return;  // tiles of a group, in 32 bits
    // A sliced kernel takes the product of K steps and slices in 32 bits.
    if (k.sliced && steps * split > kMaxExtent) return;
    const double us = predict_us(cost, model_, e, tiling, split);
    // A tie goes to the kernel that comes first in the pack, whatever the order of the search.
    if (best->kernel < 0 || us < best->us || (us == best->us && index < best->kernel)) {
      *best = Choice{index, split, us, cost.measured};
    }
  };
  if (!k.split_k) {
    if (request.only_split <= 1) offer(1);
    return;
  }
  const Means means = request.means();
  if (!(k.persistent ? means.stream : means.split)) return;
  if (request.only_split == 1 || steps < 2) return;
  const int64_t slots = int64_t{model_.sm_count} * cost.blocks_per_sm;
  if (k.persistent) {
    // Up to two tiles a block are streamed; the kernel counts their K steps in 32 bits.
    if (steps * std::min(tiles, 2 * slots) > kMaxExtent) return;
    if (request.only_split > 1) {
      const bool held = !k.sliced || tiles * request.only_split <= slots;
      if (request.only_split <= steps && held) offer(request.only_split);
    } else if (tiles >= slots && k.sliced) {
      return;
    } else if (tiles >= slots) {
      if (tiles % slots) offer(2);
    } else {
      // Slices of one length, or as many blocks as there are SMs, or slots.
      const int64_t up = k.sliced ? 0 : tiles - 1;
      const int64_t fill_sms = (model_.sm_count + up) / tiles, fill_slots = (slots + up) / tiles;
      for (int64_t split : {int64_t{2}, int64_t{3}, int64_t{4}, int64_t{6}, int64_t{8}, int64_t{12},
                            int64_t{16}, int64_t{24}, int64_t{32}, fill_sms, fill_slots}) {
        if (split < 2 || split > std::min<int64_t>(kMaxSplit, steps)) continue;
        if (tiles * split < slots + (k.sliced ? 1 : tiles)) offer(static_cast<int>(split));
      }
    }
    return;
  }
  const int64_t tile_bytes = int64_t{k.bm} * k.bn * sizeof(float);
  if (request.only_split > 1) {
    if (request.only_split <= steps) offer(request.only_split);
    return;
  }
  // Powers of two and their middles, and what exactly fills the SMs once or their block slots.
  const int64_t fill_sms = model_.sm_count / tiles;
  const int64_t fill_slots = fill_sms * cost.blocks_per_sm;
  const int64_t candidates[] = {2,  3,  4,  6,  8,   12,       16,        24,
                                32, 48, 64, 96, 128, fill_sms, fill_slots};
  uint64_t tried[kMaxSplit / 64 + 1] = {};
  for (int64_t wanted : candidates) {
    if (wanted < 2 || wanted > std::min<int64_t>(kMaxSplit, steps)) continue;
    const int split = normal_split(steps, static_cast<int>(wanted));
    uint64_t& word = tried[split / 64];
    const uint64_t bit = uint64_t{1} << (split % 64);
    if (split < 2 || (word & bit)) continue;
    word |= bit;
    if (tiles * split > 2 * slots) continue;
    if (tiles * split * tile_bytes > kMaxWorkspace) continue;
    offer(split);
  }
}

Planner::Choice Planner::choose(const mp_problem& p, const Extent& e, const PlanRequest& request,
                                std::vector<Covering>* legal) const {
  Choice best;
  if (request.only_kernel >= 0) {
    if (request.only_kernel >= pack_.kernel_count()) {
      fail(MP_INVALID, "kernel ", request.only_kernel, " does not exist; the pack holds ",
           pack_.kernel_count());
    }
    const mp_kernel& k = pack_.kernel(request.only_kernel);
    if (const char* why = refusal(KernelTraits(k), p)) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " cannot run this problem: ", why);
    }
    if (costs_[request.only_kernel].excluded) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " is excluded on ", device_.name,
           " by its performance table: it was wrong there, or others are faster; tune again to "
           "have it back");
    }
    if (!costs_[request.only_kernel].legal) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " needs ", k.shared_bytes,
           " bytes of shared memory and ", k.registers, " registers a thread, more than ",
           device_.name, " has");
    }
    consider(request.only_kernel, e, Tiling(KernelTraits(k), e), request, &best);
    if (best.kernel < 0) {
      fail(MP_INVALID, "kernel ", k.name, " cannot cut K = ", e.k, " into ", request.only_split,
           " slices (0: any): it ", k.split_k ? "needs 2 to " : "takes 1, not ",
           k.split_k ? ceil_div(e.k, k.bk) : request.only_split,
           k.sliced ? ", and its slices of all tiles must fit the GPU at once" : "");
    }
    return best;
  }
  const int precision = p.dtype == MP_F32 ? p.precision : MP_TF32;
  const std::vector<int>& kernels = pack_.kernels_of(p.dtype, precision, p.trans_a, p.trans_b);
  // The likeliest kernel first: against it most of the others need no prediction.
  std::vector<double> least;
  least.reserve(kernels.size());
  legal->reserve(kernels.size());
  const double traffic_us = e.unique_bytes / model_.bytes_per_us;
  size_t first = 0;
  for (int index : kernels) {
    const KernelCost& cost = costs_[index];
    if (!cost.legal || refusal(cost.kernel, p)) continue;
    legal->emplace_back(index, cost.kernel, e);
    least.push_back(least_us(cost, legal->back().tiling, traffic_us));
    if (least.back() < least[first]) first = least.size() - 1;
  }
  const auto try_kernel = [&](size_t i) {
    if (best.kernel >= 0 && least[i] > best.us) return;
    consider((*legal)[i].kernel, e, (*legal)[i].tiling, request, &best);
  };
  if (!least.empty()) try_kernel(first);
  for (size_t i = 0; i < least.size(); ++i) {
    if (i != first) try_kernel(i);
  }
  if (best.kernel < 0) {
    static const char* const dtypes[] = {"fp16", "bf16", "fp32"};
    fail(MP_NO_KERNEL, "kernel pack '", pack_.path(), "' has no kernel for ", dtypes[p.dtype],
         p.dtype == MP_F32 ? (p.precision == MP_IEEE ? " (ieee)" : " (tf32)") : "", " m = ", e.m,
         ", n = ", e.n, ", k = ", e.k, ", batch = ", e.batch, ", layout ", p.trans_a ? "t" : "n",
         p.trans_b ? "t" : "n", ", alignment ", p.align_a, "/", p.align_b, "/", p.align_c,
         " bytes, bias ", p.bias, ", split ", request.only_split, " on ", device_.name);
  }
  return best;
}

// Adds the launches for one area of the output.
void Planner::cover(const mp_problem& p, const mp_region& area, const PlanRequest& request,
                    mp_plan* out) const {
  const Extent extent = extent_of(p, area);
  std::vector<Covering> legal;
  const Choice choice = choose(p, extent, request, &legal);
  const bool free = request.only_split == 0 && !(request.flags & MP_PLAN_NO_REGIONS);
  TwoParts two;
  if (free && !legal.empty() && out->region_count + 2 <= MP_MAX_REGIONS &&
      cut_in_two(costs_, model_, p, area, legal, request.means(), choice.us, &two)) {
    for (int i : {0, 1}) {
      const Part& part = two.part[i];
      const bool measured = costs_[part.kernel].measured;
      add(p, part.area, {part.kernel, part.split, part.us, measured}, i == 1 && two.joined, out);
    }
    return;
  }
  add(p, area, choice, false, out);
}

// Adds one kernel's launches, cut along the batch where a grid would be too large.
void Planner::add(const mp_problem& p, const mp_region& area, const Choice& choice, bool joined,
                  mp_plan* out) const {
  const mp_kernel& k = pack_.kernel(choice.kernel);
  const int64_t tiles = ceil_div(area.m, k.bm) * ceil_div(area.n, k.bn);
  const int64_t entries = std::min(area.z, kMaxBlocks / (tiles * choice.split));
  for (int64_t z = 0; z < area.z; z += entries) {
    if (out->region_count == MP_MAX_REGIONS) {
      fail(MP_INVALID, "an output of ", p.batch, " x ", p.m, " x ", p.n, " needs more than ",
           MP_MAX_REGIONS, " launches");
    }
    mp_region r = area;
    r.kernel = choice.kernel;
    r.split = choice.split;
    r.z0 = area.z0 + z;
    r.z = std::min(entries, area.z - z);
    r.grid = grid_blocks(costs_[choice.kernel], model_, r.z * tiles, choice.split);
    if (choice.split > 1) {
      r.workspace_bytes = r.grid * k.bm * k.bn * static_cast<int64_t>(sizeof(float));
      r.counters = k.persistent ? r.grid * (k.warps / 4 - 1) : r.z * tiles;
    }
    r.predicted_us = choice.us * (double(r.z) / area.z);
    r.joins_previous = joined;
    out->measured = (out->region_count == 0 || out->measured) && choice.measured;
    append_region(r, out);
  }
}

void Planner::plan(const mp_problem& p, const PlanRequest& asked, mp_plan* out) const {
  check_problem(p);
  std::memset(out, 0, sizeof *out);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (asked.only_kernel == MP_VENDOR) return plan_vendor(p, asked, out);
  PlanRequest request = asked;
  const bool copy = is_copy(pack_, asked.only_kernel, p);
  if (copy) request.only_kernel = -1;
  for (int64_t m0 = 0; m0 < p.m; m0 += kMaxExtent) {
    for (int64_t n0 = 0; n0 < p.n; n0 += kMaxExtent) {
      mp_region area{};
      area.m0 = m0;
      area.m = std::min(kMaxExtent, p.m - m0);
      area.n0 = n0;
      area.n = std::min(kMaxExtent, p.n - n0);
      area.z = p.batch;
      cover(p, area, request, out);
    }
  }
  if (request.only_kernel < 0) consider_copies(p, request, copy, out);
  if (asked.only_kernel < 0 && asked.only_split <= 0) plan_vendor(p, asked, out);
}

std::shared_ptr<const Planned> Planner::planned(const mp_problem& p, unsigned uses,
                                                const mp_copy* repacked, bool again) const {
  if (repacked) uses |= kUsesRepacked;
  if (auto known = memory_.find(p, uses)) {
    if (!again) stats().plan_hits.fetch_add(1, std::memory_order_relaxed);
    return known;
  }
  const auto start = std::chrono::steady_clock::now();
  PlanRequest request;
  request.workspace = (uses & kUsesWorkspace) != 0;
  if (!(uses & kUsesVendor)) request.flags |= MP_PLAN_NO_VENDOR;
  auto fresh = std::make_shared<Planned>();
  fresh->problem = fresh->launched = p;
  fresh->uses = uses;
  plan(p, request, &fresh->plan);
  if (repacked) {
    mp_problem other = p;
    substitute(*repacked, 1, &other);
    mp_plan faster;
    plan(other, request, &faster);
    if (faster.predicted_us < fresh->plan.predicted_us) {
      fresh->repacked = true;
      fresh->launched = other;
      fresh->plan = faster;
    }
  }
  const auto elapsed = std::chrono::steady_clock::now() - start;
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  again ? stats().add_miss_time(ns) : stats().add_miss(ns);
  memory_.insert(fresh);
  return fresh;
}

}  // namespace moonpoly
