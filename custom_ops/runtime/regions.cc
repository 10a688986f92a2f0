#include "regions.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "error.h"
#include "pack.h"
#include "planner.h"

namespace moonpoly {
namespace {

// The prediction of two kernels errs more than that of one: they share caches and the memory. And
// a second launch costs the host 1 to 2 us, which counts where a model's nodes are short.
constexpr double kDoubt = 0.95;
constexpr double kLeastGainUs = 1.0;
constexpr int kFirstKernels = 4;  // those that cover area fastest
constexpr int kCuts = 4;          // looked at in detail, likeliest first
constexpr int kMostWaves = 24;    // of the first kernel: beyond, a last wave is a few percent
constexpr int64_t kMostTiles = 1 << 20;
constexpr int64_t kRegionWorkspace = int64_t{128} << 20;
constexpr int64_t kOffsetBytes = 256;
constexpr int64_t kAlignment = 16;  // bytes, the most that a kernel asks of its operands

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
double never() { return std::numeric_limits<double>::infinity(); }

// What the search reads of a kernel, derived once a problem.
struct Candidate {
  int index;
  const mp_kernel* kernel;
  const KernelCost* cost;
  int slots;
  int steps;       // K steps of a tile
  double share;    // of a step's cost: rows that cross lines
  double wave_us;  // of a full wave
  double rate;     // us per element of Y in full waves

  int64_t tiles(const mp_region& area) const {
    return ceil_div(area.m, kernel->bm) * ceil_div(area.n, kernel->bn) * area.z;
  }
};

// When the first kernel leaves the SMs, from the start of its first block.
struct FirstKernel {
  double begin_us;  // of its last wave: all of its blocks are placed, and the second one may start
  double end_us;
  int64_t free_sms;  // in its last wave
};

FirstKernel time_first(const Candidate& c, const DeviceModel& model, int64_t tiles) {
  const int64_t full = tiles / c.slots, rest = tiles % c.slots;
  const double head = c.kernel->persistent ? c.cost->fixed_us : 0;
  const double begin = head + static_cast<double>(rest ? full : full - 1) * c.wave_us;
  // Beside the second kernel's, its blocks run as in a full wave. They are spread over SMs.
  const int64_t busy = rest ? std::min<int64_t>(rest, model.sm_count) : model.sm_count;
  return {begin, begin + c.wave_us, model.sm_count - busy};
}

struct SecondKernel {
  int64_t blocks;
  int per_sm;
  double block_us;
};

// When the second kernel's last block ends. `ready_us`: from then on its blocks may take free SMs.
// Its blocks go wherever there is room, and the first kernel's last wave makes room when it ends.
double finish_us(const FirstKernel& first, double ready_us, double all_us, const SecondKernel& s,
                 int sm_count) {
  const int64_t aside = first.free_sms * s.per_sm, rest = (sm_count - first.free_sms) * s.per_sm;
  double next_aside = aside > 0 ? ready_us : never(), next_rest = rest > 0 ? all_us : never();
  double end = 0;
  for (int64_t left = s.blocks, waves = 0; left > 0; ++waves) {
    if (waves == kMostWaves) return never();
    const bool to_aside = next_aside <= next_rest;
    double& next = to_aside ? next_aside : next_rest;
    left -= to_aside ? aside : rest;
    next += s.block_us;
    end = std::max(end, next);
  }
  return end;
}

struct Cut {
  const Candidate* first;
  mp_region part[2];
  FirstKernel time;
  double bound_us;  // the second kernel perfectly spread
};

class Search {
 public:
  Search(const Pack& pack, const std::vector<KernelCost>& costs, const DeviceModel& model,
         const mp_problem& problem, const mp_region& area, const std::vector<int>& legal,
         const Means& means, double limit_us)
      : pack_(pack), model_(model), p_(problem), area_(area), means_(means), limit_us_(limit_us) {
    const Extent extent = extent_of(p_, area_);
    unique_ = extent.unique_bytes;
    bool maps = false;
    for (int i : legal) maps |= uses_tensor_maps(pack.kernel(i).family);
    for (int i : legal) {
      const mp_kernel& k = pack.kernel(i);
      if (maps && !uses_tensor_maps(k.family)) continue;
      if (p_.bias != MP_BIAS_MATRIX && k.bias_matrix) continue;
      if (k.split_k && !(k.persistent ? means.stream : means.split)) continue;
      const KernelCost& cost = costs[i];
      const int steps = static_cast<int>(ceil_div(p_.k, k.bk));
      const int slots = model.sm_count * cost.blocks_per_sm;
      const double share = crossing_share(k, extent);
      const double end = k.persistent ? tile_end_us(cost, steps) : cost.fixed_us;
      const double wave = end + steps * cost.step_us * share;
      candidates_.push_back(
          {i, &k, &cost, slots, steps, share, wave, wave / slots / (k.bm * k.bn)});
    }
  }

  bool run(TwoParts* out) {
    std::vector<const Candidate*> firsts;
    for (const Candidate& c : candidates_) {
      if (!c.kernel->split_k && c.tiles(area_) <= kMostTiles) firsts.push_back(&c);
    }
    const auto by_rate = [](const Candidate* a, const Candidate* b) { return a->rate < b->rate; };
    const size_t kept = std::min<size_t>(kFirstKernels, firsts.size());
    std::partial_sort(firsts.begin(), firsts.begin() + kept, firsts.end(), by_rate);
    if (kept == 0) return false;
    best_rate_ = firsts[0]->rate;
    for (size_t i = 0; i < kept; ++i) add_cuts(*firsts[i]);
    const auto by_bound = [](const Cut& a, const Cut& b) { return a.bound_us < b.bound_us; };
    std::sort(cuts_.begin(), cuts_.end(), by_bound);
    bool found = false;
    for (size_t i = 0; i < cuts_.size() && i < kCuts && cuts_[i].bound_us < limit_us_; ++i) {
      found |= second_of(cuts_[i], out);
    }
    return found;
  }

 private:
  // us of `loops_us` of the SMs' time, the first kernel's start and all traffic.
  double total_us(const Candidate& first, double loops_us, double bytes) const {
    const double fixed = first.cost->fixed_us;
    const int64_t wave = int64_t{model_.sm_count} * first.cost->blocks_per_sm;  // at least
    return launch_us(*first.kernel, *first.cost, model_, wave, first.steps) + fixed +
           std::hypot(loops_us - fixed, bytes / model_.bytes_per_us);
  }

  // Cuts at whole waves of the first kernel, and at the end of its last whole tile.
  void add_cuts(const Candidate& c) {
    if (total_us(c, c.wave_us + (c.kernel->persistent ? c.cost->fixed_us : 0), unique_) >=
        limit_us_) {
      return;  // a single wave of it takes too long
    }
    const int64_t rows = ceil_div(area_.m, c.kernel->bm), columns = ceil_div(area_.n, c.kernel->bn);
    const int64_t waves = rows * columns * area_.z / c.slots;
    if (waves > kMostWaves) return;
    const auto cut = [&](int64_t mp_region::* first, int64_t mp_region::* size, int64_t tile,
                         int64_t across) {
      const int64_t whole = area_.*size / tile;  // tiles along the axis
      const bool ragged = area_.*size % tile != 0;
      int64_t tried[3];
      int count = 0;
      for (int64_t at :
           {waves * c.slots / across, (waves - 1) * c.slots / across, ragged ? whole : whole - 1}) {
        at = std::min(at, whole);
        if (at < 1 || at * tile >= area_.*size) continue;
        // The second kernel's rows are as aligned as the problem's only where the cut is.
        const int64_t unit = kAlignment * (p_.gated && first == &mp_region::n0 ? 2 : 1);
        if (first != &mp_region::z0 && at * tile * element_bytes(p_.dtype) % unit) continue;
        if (std::find(tried, tried + count, at) != tried + count) continue;
        tried[count++] = at;
        Cut cut{&c, {area_, area_}, {}, 0};
        cut.part[0].*size = at * tile;
        cut.part[1].*first += at * tile;
        cut.part[1].*size -= at * tile;
        const int64_t tiles = c.tiles(cut.part[0]);
        cut.time = time_first(c, model_, tiles);
        const double head = c.kernel->persistent ? c.cost->fixed_us : 0;
        const mp_region& rest = cut.part[1];
        const double spread = head + static_cast<double>(tiles) / c.slots * c.wave_us +
                              double(rest.m) * rest.n * rest.z * best_rate_;
        cut.bound_us = total_us(c, std::max(cut.time.end_us, spread), unique_);
        if (cut.bound_us < limit_us_) cuts_.push_back(cut);
      }
    };
    cut(&mp_region::m0, &mp_region::m, c.kernel->bm, columns * area_.z);
    cut(&mp_region::n0, &mp_region::n, c.kernel->bn, rows * area_.z);
    if (area_.z > 1) cut(&mp_region::z0, &mp_region::z, 1, rows * columns);
  }

  bool second_of(const Cut& cut, TwoParts* out) {
    const Candidate& first = *cut.first;
    const bool can = can_join(pack_, *first.kernel);
    const double traffic = moved_bytes(cut);
    bool found = false;
    for (const Candidate& c : candidates_) {
      const int64_t tiles = c.tiles(cut.part[1]);
      if (tiles > kMostTiles) continue;
      const bool joined = can && can_join(pack_, *c.kernel);
      const double behind = cut.time.end_us + (joined ? 0 : model_.launch_us);
      const double ready =
          joined ? std::max(cut.time.begin_us, model_.launch_us) : behind;  // about so long
      for (int split : splits(c, tiles)) {
        SecondKernel s{};
        const double fixup = second_kernel(c, tiles, split, cut.time.free_sms > 0, &s);
        const double end = finish_us(cut.time, ready, std::max(behind, ready), s, model_.sm_count);
        const double us = total_us(first, std::max(end, cut.time.end_us), traffic) + fixup;
        if (us >= limit_us_) continue;
        limit_us_ = us;
        found = true;
        const double alone = std::min(total_us(first, cut.time.end_us, 0), 0.99 * us);
        *out = TwoParts{
            {{cut.part[0], first.index, 1, alone}, {cut.part[1], c.index, split, us - alone}},
            joined,
            us};
      }
    }
    return found;
  }

  // Fills in the second kernel's blocks; returns the time that its last sums over slices take.
  double second_kernel(const Candidate& c, int64_t tiles, int split, bool beside,
                       SecondKernel* out) const {
    const mp_kernel& k = *c.kernel;
    const KernelCost& cost = *c.cost;
    out->blocks = grid_blocks(k, cost, model_, tiles, split);
    out->per_sm = cost.blocks_per_sm;
    const double step =
        beside ? cost.step_us : step_us(cost, model_, std::min<int64_t>(out->blocks, c.slots));
    if (k.persistent) {
      const bool ragged = split > 1 && out->blocks < tiles * split;
      const double share = split > 1 ? double(ceil_div(tiles * c.steps, out->blocks))
                                     : double(ceil_div(tiles, out->blocks) * c.steps);
      out->block_us = cost.fixed_us + share * step * (ragged ? kRaggedStepShare : 1);
      return split > 1 ? cost.arrive_us + ceil_div(out->blocks, tiles) * cost.slice_us : 0;
    }
    out->block_us =
        cost.fixed_us + (split > 1 ? cost.slice_us : 0) + ceil_div(c.steps, split) * step;
    return split > 1 ? cost.arrive_us + split * cost.slice_us : 0;
  }

  // The K splits worth a look: 1 of a kernel without split-K, else what fills the SMs or slots.
  struct Splits {
    int values[4];
    int count = 0;
    const int* begin() const { return values; }
    const int* end() const { return values + count; }
  };
  Splits splits(const Candidate& c, int64_t tiles) const {
    Splits found;
    if (!c.kernel->split_k) {
      found.values[found.count++] = 1;
      return found;
    }
    for (int64_t wanted : {int64_t{2}, model_.sm_count / tiles, c.slots / tiles}) {
      wanted = std::min<int64_t>(wanted, std::min(c.steps, 16));
      if (wanted < 2) continue;
      // The smallest split with as many steps a slice leaves none without work.
      const int split = static_cast<int>(ceil_div(c.steps, ceil_div(c.steps, wanted)));
      // Slices that are added up together are all resident at once.
      if (tiles * split > (c.kernel->sliced ? 1 : 2) * c.slots) continue;
      if (tiles * split * c.kernel->bm * c.kernel->bn * 4 > kRegionWorkspace) continue;
      if (std::find(found.begin(), found.end(), split) != found.end()) continue;
      found.values[found.count++] = split;
    }
    return found;
  }

  double moved_bytes(const Cut& cut) const {
    if (unique_ <= model_.l2_bytes) return unique_;
    double sum = 0;
    for (const mp_region& r : cut.part) {
      sum += traffic_bytes(*cut.first->kernel, *cut.first->cost, model_, extent_of(p_, r), 1);
    }
    return sum;
  }

  const Pack& pack_;
  const DeviceModel& model_;
  const mp_problem& p_;
  const mp_region& area_;
  const Means means_;
  double limit_us_;
  double unique_ = 0, best_rate_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<Cut> cuts_;
};

bool apart(int64_t a, int64_t a_size, int64_t b, int64_t b_size) {
  return a + a_size <= b || b + b_size <= a;
}

}  // namespace

bool cut_in_two(const Pack& pack, const std::vector<KernelCost>& costs, const DeviceModel& model,
                const mp_problem& problem, const mp_region& area, const std::vector<int>& legal,
                const Means& means, double limit_us, TwoParts* out) {
  if (problem.k == 0) return false;
  return Search(pack, costs, model, problem, area, legal, means,
                std::min(kDoubt * limit_us, limit_us - kLeastGainUs))
      .run(out);
}

bool can_join(const Pack& pack, const mp_kernel& k) {
  if (!k.dependent_launch) return false;
  const int32_t* params = pack.params(k);
  return std::find(params, params + k.param_count, MP_P_ORDER) != params + k.param_count;
}

mp_order order_of(const Pack& pack, const mp_region* regions, int count, int i) {
  const auto can = [&](int region) {
    const int kernel = regions[region].kernel;
    return kernel >= 0 && can_join(pack, pack.kernel(kernel));
  };
  const auto joins = [&](int region) {
    return region > 0 && region < count && regions[region].joins_previous && can(region) &&
           can(region - 1);
  };
  if (joins(i)) return MP_ORDER_JOINS_PREVIOUS;
  return joins(i + 1) ? MP_ORDER_LETS_NEXT_JOIN : MP_ORDER_IN_TURN;
}

void append_region(const mp_region& region, mp_plan* plan) {
  mp_region r = region;
  if (r.joins_previous) {
    const mp_region& before = plan->regions[plan->region_count - 1];
    r.workspace_offset =
        ceil_div(before.workspace_offset + before.workspace_bytes, kOffsetBytes) * kOffsetBytes;
    r.counters_offset = before.counters_offset + before.counters;
  }
  if (r.workspace_bytes) {
    plan->workspace_bytes = std::max(plan->workspace_bytes, r.workspace_offset + r.workspace_bytes);
  }
  if (r.counters) plan->counters = std::max(plan->counters, r.counters_offset + r.counters);
  plan->predicted_us += r.predicted_us;
  plan->regions[plan->region_count++] = r;
}

void check_launch(const mp_kernel& k, const mp_problem& p, const mp_region& r, int i) {
  constexpr int64_t kMost = 0x7fffffff;
  const auto refuse = [&](const auto&... why) {
    fail(MP_INVALID, "region ", i, ": ", k.name, " ", why...,
         "; take regions from mp_plan_problem");
  };
  // The kernel counts in 32 bits, and rounds M and N up to its tile.
  if (r.m > kMost - k.bm || r.n > kMost - k.bn) refuse("takes fewer than 2^31 rows and columns");
  // Rows of the part are as aligned as those of the whole only where it begins and ends so.
  const auto aligned = [&](int64_t at, int64_t all, int32_t align) {
    return at == all || at * element_bytes(k.dtype) % align == 0;
  };
  const auto holds = [&](int32_t align_m, int32_t align_n) {
    return aligned(r.m0, 0, align_m) && aligned(r.m0 + r.m, p.m, align_m) &&
           aligned(r.n0, 0, align_n) && aligned(r.n0 + r.n, p.n, align_n);
  };
  const int32_t align_c = k.align_c * (p.gated ? 2 : 1);  // of two columns for each of Y
  if (!holds(k.trans_a ? k.align_a : 1, std::max(align_c, k.trans_b ? 1 : k.align_b))) {
    refuse("wants rows aligned to ", k.align_a, ", ", k.align_b, " and ", k.align_c,
           " bytes, which this part of them is not");
  }
  const int64_t rows = ceil_div(r.m, k.bm), columns = ceil_div(r.n, k.bn);
  if (rows * columns > kMost || rows * columns * r.z > kMost || k.group_m * columns > kMost) {
    refuse("would have ", rows, " x ", columns, " x ", r.z, " tiles, more than it can count");
  }
  const int64_t tiles = rows * columns * r.z, steps = ceil_div(p.k, k.bk);
  if (k.split_k ? r.split < 2 || r.split > steps : r.split != 1) {
    refuse("cannot cut ", steps, " K steps into ", r.split, " slices");
  }
  const bool whole = !k.persistent || k.sliced;  // each block has one slice of one tile
  if (tiles * r.split > kMost ? whole
      : whole                 ? r.grid != tiles * r.split
                              : r.grid > tiles * r.split) {
    refuse("has ", tiles, " tiles in ", r.split, " slices, which ", r.grid, " blocks do not fit");
  }
  if (!k.split_k) return;
  if (k.persistent && steps * (k.sliced ? r.split : std::min(tiles, 2 * r.grid)) > kMost) {
    refuse("cannot count ", steps, " K steps of ", tiles, " tiles");
  }
  const int64_t partial = int64_t{k.bm} * k.bn * static_cast<int64_t>(sizeof(float));
  const int64_t counters = k.persistent ? r.grid * (k.warps / 4 - 1) : tiles;
  if (r.workspace_bytes / partial < r.grid || r.counters < counters) {
    refuse("needs ", r.grid, " x ", partial, " bytes of workspace and ", counters,
           " counters, not ", r.workspace_bytes, " and ", r.counters);
  }
}

void check_regions(const mp_plan& plan) {
  for (const mp_copy& copy : plan.copies) {
    if (copy.bytes == 0) continue;
    const mp_copy& other = plan.copies[&copy == plan.copies];
    bool alone = &copy == plan.copies || other.bytes == 0 ||
                 apart(copy.offset, copy.bytes, other.offset, other.bytes);
    for (int i = 0; i < plan.region_count; ++i) {
      const mp_region& r = plan.regions[i];
      alone &= r.workspace_bytes == 0 ||
               apart(copy.offset, copy.bytes, r.workspace_offset, r.workspace_bytes);
    }
    if (!alone) {
      fail(MP_INVALID, "the plan's copy of ", "AB"[&copy - plan.copies],
           " shares its workspace with the other copy or a region");
    }
  }
  for (int i = 0, chain = 0; i < plan.region_count; ++i) {
    const mp_region& r = plan.regions[i];
    const auto inside = [](int64_t offset, int64_t size, int64_t all) {
      return size == 0 || (offset >= 0 && size > 0 && size <= all && offset <= all - size);
    };
    if (!inside(r.workspace_offset, r.workspace_bytes, plan.workspace_bytes) ||
        !inside(r.counters_offset, r.counters, plan.counters) || r.workspace_offset % 16) {
      fail(MP_INVALID, "region ", i, ": ", r.workspace_bytes, " bytes of workspace at ",
           r.workspace_offset, " (a multiple of 16) and ", r.counters, " counters at ",
           r.counters_offset, " do not lie within the plan's ", plan.workspace_bytes, " and ",
           plan.counters);
    }
    if (!r.joins_previous) {
      chain = i;
      continue;
    }
    if (i == 0) fail(MP_INVALID, "region 0 has none before it to run beside");
    for (int j = chain; j < i; ++j) {
      const mp_region& o = plan.regions[j];
      if (!apart(r.m0, r.m, o.m0, o.m) && !apart(r.n0, r.n, o.n0, o.n) &&
          !apart(r.z0, r.z, o.z0, o.z)) {
        fail(MP_INVALID, "regions ", j, " and ", i, " run side by side, yet write the same part");
      }
      if (!apart(r.workspace_offset, r.workspace_bytes, o.workspace_offset, o.workspace_bytes) ||
          !apart(r.counters_offset, r.counters, o.counters_offset, o.counters)) {
        fail(MP_INVALID, "regions ", j, " and ", i,
             " run side by side, yet share workspace or counters");
      }
    }
  }
}

}  // namespace moonpoly
