// The constant B of a node, copied once when the node is created, so that its rows suit the kernels
// (packing.h). The stored one stays with ONNX Runtime: some sizes of A are faster with it.
#ifndef MOONPOLY_WEIGHTS_H_
#define MOONPOLY_WEIGHTS_H_

#include <memory>
#include <vector>

#include "driver.h"
#include "moonpoly.h"
#include "ort.h"
#include "shape.h"

namespace moonpoly {

class Launcher;
class Pack;
class Planner;

class RepackedWeight {
 public:
  // Null if B is no constant matrix on the device, or a copy has no use, or there is no memory for
  // it, of which the session's log then tells. The copy is complete on return.
  static std::unique_ptr<RepackedWeight> on_device(const Ort& ort, const OrtKernelInfo* info,
                                                   Element element, bool trans_b,
                                                   const Planner& planner,
                                                   std::shared_ptr<Launcher> launcher);
  // The same on the CPU, for the interpreter backend.
  static std::unique_ptr<RepackedWeight> on_host(const Ort& ort, const OrtKernelInfo* info,
                                                 Element element, bool trans_b,
                                                 const Planner& planner, const Pack& pack);
  ~RepackedWeight();
  RepackedWeight(const RepackedWeight&) = delete;
  RepackedWeight& operator=(const RepackedWeight&) = delete;

  // The copy, by which the planner weighs it against the stored B; null if the product's B is not
  // this weight.
  const mp_copy* copy_for(const Product& product) const;
  const void* data() const { return data_; }

 private:
  RepackedWeight() = default;

  mp_copy copy_{};
  const void* data_ = nullptr;
  std::shared_ptr<Launcher> launcher_;  // on the device
  CUdeviceptr memory_ = 0;
  std::vector<char> host_;
};

}  // namespace moonpoly
#endif  // MOONPOLY_WEIGHTS_H_
