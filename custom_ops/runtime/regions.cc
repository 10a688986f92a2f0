#include "regions.h"

#include <algorithm>

#include "error.h"
#include "pack.h"

namespace moonpoly {
namespace {

constexpr int64_t kOffsetBytes = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool apart(int64_t a, int64_t a_size, int64_t b, int64_t b_size) {
  return a + a_size <= b || b + b_size <= a;
}

}  // namespace

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
