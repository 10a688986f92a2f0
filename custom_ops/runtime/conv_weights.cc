#include "conv_weights.h"

#include <algorithm>
#include <cstring>

#include "conv_shape.h"
#include "error.h"
#include "launcher.h"
#include "pack.h"

namespace moonpoly {
namespace {

constexpr int64_t kUnit = 16;  // bytes
// K steps of the kernels, in elements of 2 bytes; of 4 bytes half as many.
constexpr int64_t kStep = 32;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The share of a kernel's K steps that is of use where one covers `taps` taps along the width.
double use_of_steps(const mp_conv& c, int64_t step, int64_t taps) {
  const double channels = double(c.c) / double(round_up(std::max<int64_t>(c.c, 1), step / taps));
  return channels * double(c.kernel[2]) / double(round_up(c.kernel[2], taps));
}

int taps_at_a_time(const mp_conv& c, int64_t step) {
  if (c.transposed) return 1;
  int best = 1;
  for (int taps : {4, 8}) {
    // A step of several taps costs somewhat more: each pixel of its tile has its own place.
    if (use_of_steps(c, step, taps) > 1.2 * use_of_steps(c, step, best)) best = taps;
  }
  return best;
}

// To the nearest of 10 mantissa bits. The tensor core cuts fp32 off there, which shrinks a factor
// by 3.5e-4 on average; what is rounded already stays as it is.
uint32_t tf32(uint32_t bits) {
  constexpr uint32_t kInfinity = 0x7f800000, kCut = 0x1fff;
  if ((bits & kInfinity) == kInfinity) return bits;  // Inf, NaN
  const uint32_t rounded = (bits + (kCut >> 1) + ((bits >> 13) & 1)) & ~kCut;
  return (rounded & kInfinity) == kInfinity ? bits & ~kCut : rounded;
}

template <typename T>
void pack_elements(const mp_conv& c, const mp_conv& to, const T* w, T* packed) {
  for (int64_t g = 0; g < c.groups; ++g) {
    for (int64_t h = 0; h < c.kernel[0] * c.kernel[1]; ++h) {
      for (int64_t v = 0; v < c.kernel[2]; ++v) {
        const T* source = w + g * c.w_g + h * c.w_h + v * c.w_w;
        T* target = packed + g * to.w_g + h * to.w_h + v * to.w_w;
        for (int64_t k = 0; k < c.k; ++k) {
          for (int64_t i = 0; i < c.c; ++i) {
            target[k * to.w_k + i * to.w_c] = source[k * c.w_k + i * c.w_c];
          }
        }
      }
    }
  }
}

}  // namespace

bool is_rounded(const mp_conv& c) { return c.dtype == MP_F32 && c.precision == MP_TF32; }

int64_t packed_conv(const mp_conv& c, mp_conv* out) {
  *out = c;
  if (c.c <= 1 && c.groups > 1) return 0;  // depthwise
  if (c.c == 0 || c.k == 0) return 0;
  if (c.w_taps != 0 && !is_rounded(c)) return 0;  // stored as the kernels like it
  const int64_t bytes = element_bytes(c.dtype), unit = kUnit / bytes;
  out->w_taps = taps_at_a_time(c, kStep * 2 / bytes);
  int64_t row;
  if (out->w_taps == 1) {
    out->w_c = 1;
    out->w_k = round_up(c.c, unit);
    out->w_w = c.k * out->w_k;
    out->w_h = row = c.kernel[2] * out->w_w;
  } else {
    out->w_w = 1;
    out->w_c = round_up(c.kernel[2], out->w_taps);
    out->w_k = round_up(c.c * out->w_c, unit);
    out->w_h = row = c.k * out->w_k;
  }
  out->w_g = c.kernel[0] * c.kernel[1] * row;
  check_conv(*out);
  return c.groups * out->w_g * bytes;
}

void pack_conv(const mp_conv& c, const void* w, void* packed) {
  mp_conv to;
  const int64_t bytes = packed_conv(c, &to);
  std::memset(packed, 0, static_cast<size_t>(bytes));
  if (bytes == 0) return;
  if (element_bytes(c.dtype) == 4) {
    auto* elements = static_cast<uint32_t*>(packed);
    pack_elements(c, to, static_cast<const uint32_t*>(w), elements);
    if (is_rounded(c)) std::transform(elements, elements + bytes / 4, elements, tf32);
  } else {
    pack_elements(c, to, static_cast<const uint16_t*>(w), static_cast<uint16_t*>(packed));
  }
}

PackedConvWeight::PackedConvWeight(const mp_conv& c, const void* w) {
  mp_conv to;
  host_.resize(static_cast<size_t>(packed_conv(c, &to) + kUnit));
  char* aligned = host_.data() + -reinterpret_cast<uintptr_t>(host_.data()) % kUnit;
  pack_conv(c, w, aligned);
  data_ = aligned;
}

PackedConvWeight::PackedConvWeight(const mp_conv& c, const void* w,
                                   std::shared_ptr<Launcher> launcher)
    : launcher_(std::move(launcher)) {
  mp_conv to;
  const size_t size = static_cast<size_t>(packed_conv(c, &to));
  const size_t stored = static_cast<size_t>(c.groups * c.w_g * element_bytes(c.dtype));
  std::vector<char> from, packed(size);
  CurrentContext current(launcher_->context());
  // Synchronous copies; ONNX Runtime has stored the weights before it creates kernels.
  if (is_device_memory(w)) {
    from.resize(stored);
    check(driver().MemcpyDtoH(from.data(), reinterpret_cast<CUdeviceptr>(w), stored),
          "cuMemcpyDtoH of the weight of a convolution");
    w = from.data();
  }
  pack_conv(c, w, packed.data());
  check(driver().MemAlloc(&memory_, size), "cuMemAlloc of the packed weight of a convolution");
  if (const CUresult result = driver().MemcpyHtoD(memory_, packed.data(), size)) {
    driver().MemFree(memory_);
    check(result, "cuMemcpyHtoD of the packed weight of a convolution");
  }
  data_ = reinterpret_cast<const void*>(memory_);
}

PackedConvWeight::~PackedConvWeight() {
  if (!memory_) return;
  // At process exit the driver may be gone before us; its refusals then mean nothing.
  CUcontext popped;
  const Driver& api = driver();
  if (api.CtxPushCurrent(launcher_->context()) != 0) return;
  api.MemFree(memory_);
  api.CtxPopCurrent(&popped);
}

}  // namespace moonpoly
