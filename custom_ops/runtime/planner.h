// Chooses the micro-kernels that cover a problem. Written once; the runtime, the tuner, the command
// line and the tests all plan through it. Pure arithmetic and deterministic: the same problem on
// the same device and pack gives the same plan, hence the same bits.
#ifndef MOONPOLY_PLANNER_H_
#define MOONPOLY_PLANNER_H_

#include <memory>
#include <vector>

#include "cost_model.h"
#include "moonpoly.h"
#include "problem_cache.h"

namespace moonpoly {

class Pack;

struct PlanRequest {
  int only_kernel = -1;   // >= 0: this kernel or an error
  int only_split = 0;     // >= 1: this split or an error
  bool workspace = true;  // false: no split-K, for callers that have no stream-ordered memory
};

// A problem with its plan, as the planner remembers it.
struct Planned {
  mp_problem problem;
  bool workspace;
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
  // new input size costs a few searches, not one per node.
  std::shared_ptr<const Planned> planned(const mp_problem& problem, bool workspace) const;

  // Whether costs of this very GPU were in the pack.
  bool has_table() const { return has_table_; }
  const mp_device& device() const { return device_; }

  // What the planner of convolutions chooses by.
  const DeviceModel& model() const { return model_; }
  const KernelCost& cost(int kernel) const { return costs_[kernel]; }

 private:
  struct Choice {
    int kernel = -1, split = 1;
    double us = 0;
    bool measured = false;
  };
  Choice choose(const mp_problem& problem, const Extent& extent, const PlanRequest& request) const;
  void consider(int kernel, const Extent& extent, const PlanRequest& request, Choice* best) const;
  void cover(const mp_problem& problem, const mp_region& area, const PlanRequest& request,
             mp_plan* out) const;

  const Pack& pack_;
  mp_device device_;
  bool has_table_ = false;
  DeviceModel model_;
  std::vector<KernelCost> costs_;
  mutable ProblemCache<const Planned, 256> memory_;
};

// Why the kernel cannot run the problem, or null if it can. The one legality rule: planner,
// launcher and forced choices all ask it.
const char* refusal(const mp_kernel& kernel, const mp_problem& problem);

// Checks sizes, strides and codes of a problem that came from outside. Throws Error(MP_INVALID).
void check_problem(const mp_problem& problem);

}  // namespace moonpoly
#endif  // MOONPOLY_PLANNER_H_
