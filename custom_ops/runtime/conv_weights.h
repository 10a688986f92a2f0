// W of a convolution, stored anew: so that kernels load it 16 bytes at a time (mp_conv.w_taps), and
// rounded where they compute in TF32.
#ifndef MOONPOLY_CONV_WEIGHTS_H_
#define MOONPOLY_CONV_WEIGHTS_H_

#include <memory>
#include <vector>

#include "driver.h"
#include "moonpoly.h"

namespace moonpoly {

class Launcher;

// Whether copies of W are rounded: to TF32, which the tensor core would cut them off to.
bool is_rounded(const mp_conv& conv);
// The convolution with the strides of such a copy, in `out`; its bytes, or 0 where a copy has no
// use.
int64_t packed_conv(const mp_conv& conv, mp_conv* out);
// Makes it, in host memory.
void pack_conv(const mp_conv& conv, const void* w, void* packed);

// The copy of a constant W, made when its node is created and complete on return.
class PackedConvWeight {
 public:
  // On the device of `launcher`; `w` may be there or on the host. Throws Error(MP_CUDA), also where
  // memory is short.
  PackedConvWeight(const mp_conv& conv, const void* w, std::shared_ptr<Launcher> launcher);
  // On the host.
  PackedConvWeight(const mp_conv& conv, const void* w);
  ~PackedConvWeight();
  PackedConvWeight(const PackedConvWeight&) = delete;
  PackedConvWeight& operator=(const PackedConvWeight&) = delete;

  const void* data() const { return data_; }

 private:
  std::shared_ptr<Launcher> launcher_;  // null: on the host
  CUdeviceptr memory_ = 0;
  std::vector<char> host_;
  const void* data_ = nullptr;
};

}  // namespace moonpoly
#endif  // MOONPOLY_CONV_WEIGHTS_H_
