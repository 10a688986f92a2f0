// Chooses the micro-kernels that cover a problem. Written once; the runtime, the tuner, the command
// line and the tests all plan through it. Pure arithmetic and deterministic: the same problem on
// the same device and pack gives the same plan, hence the same bits.
#ifndef MOONPOLY_PLANNER_H_
#define MOONPOLY_PLANNER_H_

#include <memory>
#include <vector>

#include "cost_model.h"
#include "moonpoly.h"
#include "prediction.h"
#include "problem_cache.h"
#include "two_regions.h"
#include "vendor_model.h"

namespace moonpoly {

class Pack;

struct PlanRequest {
  int only_kernel = -1;   // >= 0, or MP_VENDOR: this kernel or an error
  int only_split = 0;     // >= 1: this split or an error
  bool workspace = true;  // false: no split-K, for callers that have no stream-ordered memory
  int flags = 0;          // mp_plan_flags

  Means means() const {
    return {workspace && !(flags & MP_PLAN_NO_SPLIT), workspace && !(flags & MP_PLAN_NO_STREAM)};
  }
};

// What a caller's plans may use besides kernels of the pack; bits of ProblemCache's `uses`.
constexpr unsigned kUsesWorkspace = 1, kUsesVendor = 2, kUsesRepacked = 4;

// A problem with its plan, as the planner remembers it.
struct Planned {
  mp_problem problem;
  unsigned uses;
  bool repacked;        // the plan is for the repacked weight
  mp_problem launched;  // what it is a plan of: the problem, with the copy as its B where repacked
  mp_plan plan;
};

class Planner {
 public:
  // The pack must outlive the planner. Throws Error(MP_BAD_PACK) if its code cannot run on the
  // device.
  Planner(const Pack& pack, const mp_device& device);

  // Throws Error(MP_INVALID) for an illegal problem, Error(MP_NO_KERNEL) if nothing covers it.
  void plan(const mp_problem& problem, const PlanRequest& request, mp_plan* out) const;

  // The remembered plan, made on first sight. Layers of a model repeat the same problems, so that a
  // new input size costs a few searches, not one per node. `repacked`: the copy of a constant B
  // (packing.h), which is multiplied instead where that is predicted to be faster; or null.
  // `again`: for a product that the statistics have counted already.
  std::shared_ptr<const Planned> planned(const mp_problem& problem, unsigned uses,
                                         const mp_copy* repacked = nullptr,
                                         bool again = false) const;

  // Whether costs of this very GPU were in the pack.
  bool has_table() const { return has_table_; }
  // Whether they tell of cuBLASLt too, so that it may be chosen.
  bool has_vendor() const { return offers_vendor_; }
  const mp_device& device() const { return device_; }
  // Whether the device and its performance table let a copy's kernel run.
  bool usable(const mp_copy& copy) const;

  // What the planner of convolutions chooses by.
  const DeviceModel& model() const { return model_; }
  const KernelCost& cost(int kernel) const { return costs_[kernel]; }

 private:
  struct Choice {
    int kernel = -1, split = 1;
    double us = 0;
    bool measured = false;
  };
  // `legal` receives the kernels among which it was free to choose.
  Choice choose(const mp_problem& problem, const Extent& extent, const PlanRequest& request,
                std::vector<Covering>* legal) const;
  // Takes the kernel for `best` where it is, with the split that suits it.
  void consider(int kernel, const Extent& extent, const Tiling& tiling, const PlanRequest& request,
                Choice* best) const;
  void cover(const mp_problem& problem, const mp_region& area, const PlanRequest& request,
             mp_plan* out) const;
  // Puts cuBLASLt in the place of the plan where that is promised to be faster, or forced.
  void plan_vendor(const mp_problem& problem, const PlanRequest& request, mp_plan* out) const;
  void add(const mp_problem& problem, const mp_region& area, const Choice& choice, bool joined,
           mp_plan* out) const;
  void consider_copies(const mp_problem& problem, const PlanRequest& request, bool forced,
                       mp_plan* out) const;  // in packing.cc

  const Pack& pack_;
  mp_device device_;
  bool has_table_ = false;
  DeviceModel model_;
  std::vector<KernelCost> costs_;
  VendorModel vendor_;
  bool offers_vendor_ = false;
  mutable ProblemCache<const Planned, 512> memory_;
};

// Why the kernel cannot run the problem, or null if it can. The one legality rule: planner,
// launcher and forced choices all ask it.
const char* refusal(const KernelTraits& kernel, const mp_problem& problem);

// What a prediction needs to know of a region of the problem.
Extent extent_of(const mp_problem& problem, const mp_region& region);

// Checks sizes, strides and codes of a problem that came from outside. Throws Error(MP_INVALID).
void check_problem(const mp_problem& problem);

}  // namespace moonpoly
#endif  // MOONPOLY_PLANNER_H_
