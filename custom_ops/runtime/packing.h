// Operands whose rows are not aligned to 16 bytes, copied so that they are: A and B in front of a
// plan's regions, a constant B once. A copy has its rows along K, with zeros up to the next 16
// bytes.
#ifndef MOONPOLY_PACKING_H_
#define MOONPOLY_PACKING_H_

#include "moonpoly.h"

namespace moonpoly {

class Pack;
struct DeviceModel;

// A copy as a launch: the problem and the region that its kernel sees.
struct CopyLaunch {
  mp_problem problem;
  mp_region region;
};

inline bool has_copies(const mp_plan& plan) {
  return plan.copies[0].bytes > 0 || plan.copies[1].bytes > 0;
}

// The copy of A (operand 0) or B (1) of a problem; `bytes` is 0 if the pack has no kernel for it.
// `offset` is left 0.
mp_copy copy_of(const Pack& pack, const mp_problem& problem, int operand);

// How `copy` is launched.
CopyLaunch launch_of(const mp_problem& problem, const mp_copy& copy, int operand);

// The problem with the operand replaced by its copy, or both by those of a plan.
void substitute(const mp_copy& copy, int operand, mp_problem* problem);
mp_problem copied(const mp_problem& problem, const mp_plan& plan);

// Whether a copy of the operand may help some kernel.
bool gains_from_copy(const Pack& pack, const mp_problem& problem, int operand);

// The copy of a constant B that is made once; `bytes` is 0 where that has no use.
mp_copy repacked(const Pack& pack, const mp_problem& problem);

// For plans that come from outside. Throws Error(MP_INVALID).
void check_copies(const Pack& pack, const mp_problem& problem, const mp_plan& plan);

// Whether `kernel` copies, so that forcing it forces copies. Throws Error(MP_NO_KERNEL) if it does
// not fit the problem.
bool is_copy(const Pack& pack, int kernel, const mp_problem& problem);

// Microseconds for one copy.
double copy_us(const mp_problem& problem, const mp_copy& copy, int operand, const mp_kernel& kernel,
               const DeviceModel& model);

}  // namespace moonpoly
#endif  // MOONPOLY_PACKING_H_
