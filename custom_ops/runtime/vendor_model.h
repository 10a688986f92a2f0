// Predicted time of cuBLASLt, whose kernels and choices are its own: a fit to its timings on this
// GPU, per class of problems (see mp_vendor_cost). Pure arithmetic, about 0.3 us a comparison.
#ifndef MOONPOLY_VENDOR_MODEL_H_
#define MOONPOLY_VENDOR_MODEL_H_

#include <array>
#include <vector>

#include "moonpoly.h"
#include "prediction.h"

namespace moonpoly {

// What is wrong with the numbers of a model that came from a file, or null.
const char* fault(const mp_vendor_cost& cost);

class VendorModel {
 public:
  VendorModel() = default;
  VendorModel(const mp_vendor_cost* costs, int count, const DeviceModel& device);

  bool empty() const { return costs_.empty(); }

  // Of the problem's class; null where it was not measured.
  const mp_vendor_cost* cost_of(const mp_problem& problem) const;

  // Whether `compare` may find it worth its host time, which is asked first: it costs nothing.
  bool may_win(const mp_vendor_cost& cost, double promised_us) const;

  // Microseconds that cuBLASLt and another plan are likely to take.
  struct Comparison {
    double vendor_us, other_us;
  };
  // `split`: whether cuBLASLt may cut K, which needs a workspace. The other plan promises
  // `promised_us`.
  Comparison compare(const mp_vendor_cost& cost, const mp_problem& problem, const Extent& extent,
                     bool split, double promised_us) const;

 private:
  std::vector<mp_vendor_cost> costs_;
  std::vector<double> most_promise_;  // of each: the greatest factor on another plan's promise
  std::array<int16_t, 96> places_{};  // by class, from 1; 0: not measured
  int sm_count_ = 1;
};

}  // namespace moonpoly
#endif  // MOONPOLY_VENDOR_MODEL_H_
