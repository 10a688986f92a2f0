// Two kernels for one product: whole waves of a large tile over most of it, and over the rest what
// fills the last wave. On sm_90 the second runs beside the end of the first (programmatic dependent
// launch); elsewhere behind it.
#ifndef MOONPOLY_REGIONS_H_
#define MOONPOLY_REGIONS_H_

#include <cstdint>
#include <vector>

#include "moonpoly.h"
#include "prediction.h"

namespace moonpoly {

class Pack;

// What a choice may use.
struct Means {
  bool split;   // K in slices
  bool stream;  // K dealt to persistent blocks
};

struct Part {
  mp_region area;
  int kernel, split;
  double us;  // of the second part: what it adds
};

struct TwoParts {
  Part part[2];
  bool joined;  // the second one runs beside the first
  double us;
};

// A kernel that may run a problem, and how its tiles cover the area at hand.
struct Covering {
  int kernel;
  Tiling tiling;

  Covering(int index, const KernelTraits& traits, const Extent& extent)
      : kernel(index), tiling(traits, extent) {}
};

// Looks for a cut of `area` whose two kernels are predicted to take less than `limit_us`, margin of
// doubt included. `legal` are the kernels that may run the problem, in
// the pack's order. False: there is none.
bool cut_in_two(const std::vector<KernelCost>& costs, const DeviceModel& model,
                const mp_problem& problem, const mp_region& area,
                const std::vector<Covering>& legal, const Means& means, double limit_us,
                TwoParts* out);

// Whether a kernel can run beside another: it has a parameter ORDER and is launched early.
bool can_join(const Pack& pack, const mp_kernel& kernel);

// What the kernel of a region is told of its neighbours on the stream.
mp_order order_of(const Pack& pack, const mp_region* regions, int count, int region);

// Places a region's partials and counters behind those of the regions that it runs beside, and adds
// it to the plan, which has room for it.
void append_region(const mp_region& region, mp_plan* plan);

// Throws Error(MP_INVALID) where regions that run side by side write the same part of Y, or share
// workspace or counters, or where these lie outside of the plan's, or where copies lie in them.
void check_regions(const mp_plan& plan);

// The same for region number `i` of a plan from outside, whose extents lie within the problem: its
// grid, split, workspace and counters must be such that the kernel stays within what it is given.
void check_launch(const mp_kernel& kernel, const mp_problem& problem, const mp_region& region,
                  int i);

}  // namespace moonpoly
#endif  // MOONPOLY_REGIONS_H_
