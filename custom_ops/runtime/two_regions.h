// Two kernels for one product: whole waves of a large tile over most of it, and over the rest what
// fills the last wave. On sm_90 the second runs beside the end of the first (programmatic dependent
// launch); elsewhere behind it.
#ifndef MOONPOLY_TWO_REGIONS_H_
#define MOONPOLY_TWO_REGIONS_H_

#include <cstdint>
#include <vector>

#include "moonpoly.h"
#include "prediction.h"

namespace moonpoly {

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
// doubt included. `legal` are the kernels that may run the problem, in the pack's order. False:
// there is none.
bool cut_in_two(const std::vector<KernelCost>& costs, const DeviceModel& model,
                const mp_problem& problem, const mp_region& area,
                const std::vector<Covering>& legal, const Means& means, double limit_us,
                TwoParts* out);

}  // namespace moonpoly
#endif  // MOONPOLY_TWO_REGIONS_H_
