#include "two_regions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

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
constexpr int64_t kAlignment = 16;  // bytes, the most that a kernel asks of its operands

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
double never() { return std::numeric_limits<double>::infinity(); }

constexpr double kRounding = 1e-9;  // by which bounds may be off, relatively

// What the search reads of a kernel, derived once a problem.
struct Candidate {
  int index;
  const KernelTraits* kernel;
  const KernelCost* cost;
  int slots;
  int steps;          // K steps of a tile
  double share;       // of a step's cost: rows that cross lines
  double finish_us;   // what follows the product, at the end of a block
  double wave_us;     // of a full wave
  double rate;        // us per element of Y in full waves
  double least_rate;  // no share of a K step on the device is less, whatever the split

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
  int64_t mp_region::* begin;  // the axis that is cut
  int64_t mp_region::* size;
  int64_t first_size;
  FirstKernel time;
  double bound_us;  // the second kernel perfectly spread

  // The first kernel's part of the area, or the rest.
  mp_region first_part(mp_region area) const {
    area.*size = first_size;
    return area;
  }
  mp_region rest(mp_region area) const {
    area.*begin += first_size;
    area.*size -= first_size;
    return area;
  }
};

class Search {
 public:
  Search(const std::vector<KernelCost>& costs, const DeviceModel& model, const mp_problem& problem,
         const mp_region& area, const std::vector<Covering>& legal, const Means& means,
         double limit_us)
      : costs_(costs),
        model_(model),
        p_(problem),
        area_(area),
        legal_(legal),
        means_(means),
        limit_us_(limit_us),
        extent_(extent_of(problem, area)) {
    for (const Covering& c : legal_) maps_ |= costs_[c.kernel].kernel.tensor_maps;
  }

  bool run(TwoParts* out) {
    struct Ranked {
      double rate;
      const Covering* covering;
    };
    std::vector<Ranked> ranked;
    ranked.reserve(legal_.size());
    for (const Covering& c : legal_) {
      if (!takes_part(c) || costs_[c.kernel].kernel.split_k) continue;
      if (c.tiling.tiles <= kMostTiles) ranked.push_back({candidate(c).rate, &c});
    }
    const auto by_rate = [](const Ranked& a, const Ranked& b) { return a.rate < b.rate; };
    const size_t kept = std::min<size_t>(kFirstKernels, ranked.size());
    std::partial_sort(ranked.begin(), ranked.begin() + kept, ranked.end(), by_rate);
    if (kept == 0) return false;
    best_rate_ = ranked[0].rate;
    std::array<Candidate, kFirstKernels> firsts;
    for (size_t i = 0; i < kept; ++i) {
      firsts[i] = candidate(*ranked[i].covering);
      add_cuts(firsts[i]);
    }
    if (cuts_.empty()) return false;
    candidates_.reserve(legal_.size());
    for (const Covering& c : legal_) {
      if (takes_part(c)) candidates_.push_back(candidate(c));
    }
    const auto by_bound = [](const Cut& a, const Cut& b) { return a.bound_us < b.bound_us; };
    std::sort(cuts_.begin(), cuts_.end(), by_bound);
    bool found = false;
    for (size_t i = 0; i < cuts_.size() && i < kCuts && cuts_[i].bound_us < limit_us_; ++i) {
      found |= second_of(cuts_[i], out);
    }
    return found;
  }

 private:
  bool takes_part(const Covering& c) const {
    const KernelTraits& k = costs_[c.kernel].kernel;
    if (maps_ && !k.tensor_maps) return false;
    if (p_.bias != MP_BIAS_MATRIX && k.bias_matrix) return false;
    return !k.split_k || (k.persistent ? means_.stream : means_.split);
  }

  Candidate candidate(const Covering& c) const {
    const KernelCost& cost = costs_[c.kernel];
    const KernelTraits& k = cost.kernel;
    const int steps = c.tiling.steps;
    const int slots = model_.sm_count * cost.blocks_per_sm;
    const double share = crossing_share(k, extent_);
    const Finish finish = finish_of(cost, model_, extent_, c.tiling);
    const double end = (k.persistent ? tile_end_us(cost, steps) : cost.fixed_us) + finish.each;
    const double wave = end + steps * cost.step_us * share;
    const int area = k.bm * k.bn;
    return {c.kernel,
            &k,
            &cost,
            slots,
            steps,
            share,
            finish.last,
            wave,
            wave / slots / area,
            steps * cost.least_step_us / (double(slots) * area)};
  }

  // How long a slot is not the second kernel's, on average. Behind `all_us`, when every slot is, no
  // kernel ends before that and its blocks' time divided by the slots.
  double idle_us(const FirstKernel& first, double ready_us, double all_us) const {
    const int64_t rest = model_.sm_count - first.free_sms;
    return (first.free_sms * ready_us + rest * all_us) / model_.sm_count * (1 - kRounding);
  }

  // us of `loops_us` of the SMs' time, the first kernel's start and all traffic.
  double total_us(const Candidate& first, double loops_us, double bytes) const {
    const double fixed = first.cost->fixed_us;
    const int64_t wave = int64_t{model_.sm_count} * first.cost->blocks_per_sm;  // at least
    return launch_us(*first.cost, model_, wave, first.steps) + fixed +
           std::hypot(loops_us - fixed, bytes / model_.bytes_per_us);
  }

  // The longest loops with which total_us may be below the limit.
  double most_loops_us(const Candidate& first, double bytes) const {
    const double fixed = first.cost->fixed_us;
    const double room = limit_us_ - total_us(first, fixed, 0);
    const double streams = bytes / model_.bytes_per_us;
    if (room < streams) return -never();
    return (fixed + std::sqrt(room * room - streams * streams)) * (1 + kRounding);
  }

  // Cuts at whole waves of the first kernel, and at the end of its last whole tile.
  void add_cuts(const Candidate& c) {
    const double head = c.kernel->persistent ? c.cost->fixed_us : 0;
    const double most = most_loops_us(c, extent_.unique_bytes);
    if (head + c.wave_us > most) return;  // a single wave of it takes too long
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
        const int64_t tiles = at * across;
        Cut cut{&c, first, size, at * tile, time_first(c, model_, tiles), 0};
        const mp_region rest = cut.rest(area_);
        const double spread = head + static_cast<double>(tiles) / c.slots * c.wave_us +
                              double(rest.m) * rest.n * rest.z * best_rate_;
        const double loops = std::max(cut.time.end_us, spread);
        if (loops > most) continue;
        cut.bound_us = total_us(c, loops, extent_.unique_bytes);
        if (cut.bound_us < limit_us_) cuts_.push_back(cut);
      }
    };
    cut(&mp_region::m0, &mp_region::m, c.kernel->bm, columns * area_.z);
    cut(&mp_region::n0, &mp_region::n, c.kernel->bn, rows * area_.z);
    if (area_.z > 1) cut(&mp_region::z0, &mp_region::z, 1, rows * columns);
  }

  bool second_of(const Cut& cut, TwoParts* out) {
    const Candidate& first = *cut.first;
    const double traffic = moved_bytes(cut);
    double most = most_loops_us(first, traffic);
    const mp_region rest = cut.rest(area_);
    const double rest_area = double(rest.m) * rest.n * rest.z;
    bool found = false;
    for (const Candidate& c : candidates_) {
      const bool joined = first.cost->joins && c.cost->joins;
      const double behind = cut.time.end_us + (joined ? 0 : model_.launch_us);
      const double ready =
          joined ? std::max(cut.time.begin_us, model_.launch_us) : behind;  // about so long
      const double all = std::max(behind, ready);
      const double spread = idle_us(cut.time, ready, all) + rest_area * c.least_rate;
      if (spread > std::max(all, most)) continue;
      const int64_t tiles = c.tiles(rest);
      if (tiles > kMostTiles) continue;
      for (int split : splits(c, tiles)) {
        SecondKernel s{};
        const double fixup = second_kernel(c, tiles, split, cut.time.free_sms > 0, &s);
        if (ready + s.block_us + fixup > most) continue;
        const double end = finish_us(cut.time, ready, all, s, model_.sm_count);
        const double loops = std::max(end, cut.time.end_us);
        if (loops + fixup > most) continue;
        const double us = total_us(first, loops, traffic) + fixup;
        if (us >= limit_us_) continue;
        limit_us_ = us;
        most = most_loops_us(first, traffic);
        found = true;
        const double alone = std::min(total_us(first, cut.time.end_us, 0), 0.99 * us);
        *out = TwoParts{
            {{cut.first_part(area_), first.index, 1, alone}, {rest, c.index, split, us - alone}},
            joined,
            us};
      }
    }
    return found;
  }

  // Fills in the second kernel's blocks; returns the time that its last sums over slices take.
  double second_kernel(const Candidate& c, int64_t tiles, int split, bool beside,
                       SecondKernel* out) const {
    const KernelTraits& k = *c.kernel;
    const KernelCost& cost = *c.cost;
    out->blocks = grid_blocks(cost, model_, tiles, split);
    out->per_sm = cost.blocks_per_sm;
    const double step =
        beside ? cost.step_us : step_us(cost, model_, std::min<int64_t>(out->blocks, c.slots));
    if (k.persistent) {
      const bool ragged = split > 1 && out->blocks < tiles * split;
      const double share = split > 1 ? double(ceil_div(tiles * c.steps, out->blocks))
                                     : double(ceil_div(tiles, out->blocks) * c.steps);
      out->block_us = cost.fixed_us + share * step * (ragged ? kRaggedStepShare : 1) + c.finish_us;
      return split > 1 ? cost.arrive_us + ceil_div(out->blocks, tiles) * cost.slice_us : 0;
    }
    out->block_us = cost.fixed_us + (split > 1 ? cost.slice_us : 0) +
                    ceil_div(c.steps, split) * step + c.finish_us;
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
    if (extent_.unique_bytes <= model_.l2_bytes) return extent_.unique_bytes;
    double sum = 0;
    for (const mp_region& r : {cut.first_part(area_), cut.rest(area_)}) {
      const Extent extent = extent_of(p_, r);
      sum += traffic_bytes(*cut.first->cost, model_, extent, {*cut.first->kernel, extent}, 1);
    }
    return sum;
  }

  const std::vector<KernelCost>& costs_;
  const DeviceModel& model_;
  const mp_problem& p_;
  const mp_region& area_;
  const std::vector<Covering>& legal_;
  const Means means_;
  double limit_us_;
  const Extent extent_;
  bool maps_ = false;  // a kernel that uses tensor maps is among them
  double best_rate_ = 0;
  std::vector<Candidate> candidates_;  // to be the second
  std::vector<Cut> cuts_;
};

}  // namespace

bool cut_in_two(const std::vector<KernelCost>& costs, const DeviceModel& model,
                const mp_problem& problem, const mp_region& area,
                const std::vector<Covering>& legal, const Means& means, double limit_us,
                TwoParts* out) {
  if (problem.k == 0) return false;
  return Search(costs, model, problem, area, legal, means,
                std::min(kDoubt * limit_us, limit_us - kLeastGainUs))
      .run(out);
}

}  // namespace moonpoly
