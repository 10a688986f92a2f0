// Regions of a plan and their neighbours on the stream: which run side by side, the scratch memory
// that each has, and the checks of those that come from outside.
#ifndef MOONPOLY_REGIONS_H_
#define MOONPOLY_REGIONS_H_

#include "moonpoly.h"

namespace moonpoly {

class Pack;

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
