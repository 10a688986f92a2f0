// The launch of convolutions. Their operands are plain pointers; a region moves them to its first
// image.
#include <string>

#include "conv_shape.h"
#include "error.h"
#include "launcher.h"
#include "op_structure.h"
#include "pack.h"
#include "stats.h"

namespace moonpoly {
namespace {

union Argument {
  int32_t i32;
  int64_t i64;
  float f32;
  const void* pointer;
};

struct Work {
  const mp_conv& conv;
  const mp_region& region;
  const Operands& operands;
  void* workspace;
  void* counters;
};

Argument i32(int64_t value) {
  Argument a;
  a.i32 = static_cast<int32_t>(value);
  return a;
}

Argument i64(int64_t value) {
  Argument a;
  a.i64 = value;
  return a;
}

Argument f32(float value) {
  Argument a;
  a.f32 = value;
  return a;
}

Argument pointer(const void* value) {
  Argument a;
  a.pointer = value;
  return a;
}

Argument argument(int32_t param, const Work& work) {
  const mp_conv& c = work.conv;
  const mp_region& r = work.region;
  switch (param) {
    case MP_P_CONV_X:
      return pointer(work.operands.b);
    case MP_P_CONV_W:
      return pointer(work.operands.a);
    case MP_P_CONV_Y:
      return pointer(work.operands.y);
    case MP_P_CONV_BIAS:
      return pointer(work.operands.bias ? work.operands.bias : work.operands.y);
    case MP_P_CONV_HAS_BIAS:
      return i32(work.operands.bias != nullptr);
    case MP_P_PTR_WORKSPACE:
      return pointer(work.workspace);
    case MP_P_PTR_COUNTERS:
      return pointer(work.counters);
    case MP_P_PTR_RESIDUAL:
      return pointer(work.operands.residual);
    case MP_P_ACTIVATION:
      return i32(epilogue_code(c));
    case MP_P_ACT_ALPHA:
      return f32(c.act_alpha);
    case MP_P_ACT_BETA:
      return f32(c.act_beta);
    case MP_P_NULL:
      return pointer(nullptr);
    case MP_P_M:
      return i32(r.m);
    case MP_P_N:
      return i32(r.n);
    case MP_P_SPLIT:
      return i32(r.split);
    case MP_P_Z0:
      return i32(r.z0);
    case MP_P_CONV_C:
      return i32(c.c);
    case MP_P_CONV_K:
      return i32(c.k);
    case MP_P_CONV_GROUPS:
      return i32(c.groups);
    case MP_P_CONV_IN_D:
      return i32(c.in[0]);
    case MP_P_CONV_IN_H:
      return i32(c.in[1]);
    case MP_P_CONV_IN_W:
      return i32(c.in[2]);
    case MP_P_CONV_OUT_H:
      return i32(c.out[1]);
    case MP_P_CONV_OUT_W:
      return i32(c.out[2]);
    case MP_P_CONV_KERNEL_D:
    case MP_P_CONV_KERNEL_H:
    case MP_P_CONV_KERNEL_W:
      return i32(c.kernel[param - MP_P_CONV_KERNEL_D]);
    case MP_P_CONV_STRIDE_D:
    case MP_P_CONV_STRIDE_H:
    case MP_P_CONV_STRIDE_W:
      return i32(c.stride[param - MP_P_CONV_STRIDE_D]);
    case MP_P_CONV_DILATION_D:
    case MP_P_CONV_DILATION_H:
    case MP_P_CONV_DILATION_W:
      return i32(c.dilation[param - MP_P_CONV_DILATION_D]);
    case MP_P_CONV_PAD_D:
    case MP_P_CONV_PAD_H:
    case MP_P_CONV_PAD_W:
      return i32(c.pad[param - MP_P_CONV_PAD_D]);
    case MP_P_CONV_PIXELS:
      return i32(out_pixels(c));
    case MP_P_CONV_CHANNEL:
      return i64(c.in[0] * c.in[1] * c.in[2]);
    case MP_P_CONV_W_G:
      return i64(c.w_g);
    case MP_P_CONV_W_K:
      return i64(c.w_k);
    case MP_P_CONV_W_C:
      return i64(c.w_c);
    case MP_P_CONV_W_H:
      return i64(c.w_h);
    case MP_P_CONV_W_W:
      return i64(c.w_w);
  }
  fail(MP_BAD_PACK, "a convolution has no parameter of code ", param);
}

// The operands from image number `image` on.
Operands from_image(const mp_conv& c, Operands operands, int64_t image) {
  if (image == 0) return operands;
  const int64_t first = image * c.groups * element_bytes(c.dtype);
  const int64_t y = first * c.k * out_pixels(c);
  operands.b = static_cast<const char*>(operands.b) + first * c.c * c.in[0] * c.in[1] * c.in[2];
  operands.y = static_cast<char*>(operands.y) + y;
  if (operands.residual) operands.residual = static_cast<const char*>(operands.residual) + y;
  return operands;
}

}  // namespace

void Launcher::launch_conv(const mp_conv& conv, const mp_plan& plan, const Operands& operands,
                           void* workspace, void* counters, CUstream stream) {
  const auto turn = turn_of(counters);
  for (int i = 0; i < plan.region_count; ++i) {
    const mp_region& r = plan.regions[i];
    const mp_kernel& k = pack_->kernel(r.kernel);
    if (!functions_[r.kernel]) {
      fail(MP_NO_KERNEL, "kernel ", k.name, " does not fit GPU ", ordinal_);
    }
    const Operands own = from_image(conv, operands, r.n0 / out_pixels(conv));
    const Work work{conv, r, own, workspace, counters};
    Argument arguments[kMaxArguments];
    void* pointers[kMaxArguments];
    const int32_t* params = pack_->params(k);
    for (int j = 0; j < k.param_count; ++j) {
      arguments[j] = argument(params[j], work);
      pointers[j] = &arguments[j];
    }
    const CUresult result =
        driver().LaunchKernel(functions_[r.kernel], static_cast<unsigned>(r.grid), 1, 1,
                              32 * k.warps, 1, 1, k.shared_bytes, stream, pointers, nullptr);
    if (result) check(result, (std::string("cuLaunchKernel of ") + k.name).c_str());
    stats().launches.fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace moonpoly
