// Chooses the kernel for a convolution, as `Planner` does for matrix products: the same costs, the
// same rules of determinism and of remembering.
#ifndef MOONPOLY_CONV_PLANNER_H_
#define MOONPOLY_CONV_PLANNER_H_

#include <memory>

#include "moonpoly.h"
#include "planner.h"
#include "problem_cache.h"

namespace moonpoly {

class Pack;

// A convolution with its plan, as the planner remembers it.
struct PlannedConv {
  mp_conv problem;
  unsigned uses;  // as of Planned
  mp_plan plan;
};

class ConvPlanner {
 public:
  // The pack must outlive it.
  ConvPlanner(const Pack& pack, std::shared_ptr<const Planner> planner);

  // Throws Error(MP_INVALID) for an illegal convolution, Error(MP_NO_KERNEL) if nothing covers it.
  void plan(const mp_conv& conv, const PlanRequest& request, mp_plan* out) const;

  // The remembered plan, made on first sight.
  std::shared_ptr<const PlannedConv> planned(const mp_conv& conv, unsigned uses) const;

 private:
  struct Choice {
    int kernel = -1, split = 1;
    int64_t blocks = 0;
    double us = 0;
    bool measured = false;
  };
  void consider(int kernel, const mp_conv& conv, const PlanRequest& request, Choice* best) const;
  Choice choose(const mp_conv& conv, const PlanRequest& request) const;

  const Pack& pack_;
  const std::shared_ptr<const Planner> planner_;
  mutable ProblemCache<const PlannedConv, 512> memory_;
};

// Why the kernel cannot run the convolution, or null if it can.
const char* conv_refusal(const mp_kernel& kernel, const mp_conv& conv);

// Of the regions that a kernel covers a convolution with: rows, batch entries, and images that lie
// side by side in the columns of one entry.
int64_t conv_rows(const mp_kernel& kernel, const mp_conv& conv);
int64_t conv_entries(const mp_kernel& kernel, const mp_conv& conv);
int64_t conv_images(const mp_kernel& kernel, const mp_conv& conv);

// Columns of a region: with those that fill its last tile, an i32 counts them.
constexpr int64_t kMaxConvColumns = (int64_t{1} << 31) - 512;

// K steps of a kernel.
int64_t conv_steps(const mp_kernel& kernel, const mp_conv& conv);

}  // namespace moonpoly
#endif  // MOONPOLY_CONV_PLANNER_H_
