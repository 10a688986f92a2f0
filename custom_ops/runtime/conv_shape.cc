#include "conv_shape.h"

#include <algorithm>
#include <initializer_list>

#include "error.h"
#include "op_structure.h"
#include "pack.h"

namespace moonpoly {
namespace {

constexpr int kAxes = 3;
// Kernels work out coordinates, and offsets within a channel, in 32 bits.
constexpr int64_t kMaxCoordinate = int64_t{1} << 30;
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1024;

struct Axis {
  int64_t in, kernel, stride, dilation, pad_begin, pad_end, output_padding, output_shape;
  int64_t out;
};

const char* op_name(const mp_conv_attributes& a) { return a.transposed ? "ConvTranspose" : "Conv"; }

int64_t clamp_to_zero(int64_t x) { return std::max<int64_t>(0, x); }

void check_count(const mp_conv_attributes& a, const char* name, int count, int expected) {
  if (count != 0 && count != expected) {
    fail(MP_INVALID, op_name(a), ": ", name, " has ", count, " values; X has as many spatial ",
         "dimensions that ", expected, " are needed");
  }
}

void check_least(const mp_conv_attributes& a, const char* name, int64_t value, int64_t least) {
  if (value < least || value > kMaxCoordinate) {
    fail(MP_INVALID, op_name(a), ": ", name, " holds ", value, "; ", least, " to ", kMaxCoordinate,
         " are possible");
  }
}

// Splits padding between the two ends: the odd one goes to the end for SAME_UPPER.
void distribute(int64_t total, bool upper, Axis* axis) {
  axis->pad_begin = upper ? total / 2 : total - total / 2;
  axis->pad_end = total - axis->pad_begin;
}

void resolve_forward(const mp_conv_attributes& a, Axis* axis) {
  const int64_t reach = axis->dilation * (axis->kernel - 1) + 1;
  if (a.auto_pad == MP_SAME_UPPER || a.auto_pad == MP_SAME_LOWER) {
    const int64_t out = (axis->in + axis->stride - 1) / axis->stride;
    distribute(clamp_to_zero((out - 1) * axis->stride + reach - axis->in),
               a.auto_pad == MP_SAME_UPPER, axis);
  } else if (a.auto_pad == MP_VALID) {
    axis->pad_begin = axis->pad_end = 0;
  }
  const int64_t room = axis->in + axis->pad_begin + axis->pad_end - reach;
  // One position less than none is no output; a shorter input has no meaning.
  if (room < -axis->stride) {
    fail(MP_INVALID, "Conv: a kernel of ", axis->kernel, " with dilation ", axis->dilation,
         " does not fit ", axis->in, " pixels padded by ", axis->pad_begin, " and ", axis->pad_end);
  }
  axis->out = room < 0 ? 0 : room / axis->stride + 1;
}

void resolve_transposed(const mp_conv_attributes& a, Axis* axis) {
  const int64_t reach = axis->dilation * (axis->kernel - 1) + 1;
  const int64_t whole = axis->stride * (axis->in - 1) + axis->output_padding + reach;
  const bool same = a.auto_pad == MP_SAME_UPPER || a.auto_pad == MP_SAME_LOWER;
  if (a.output_shape_count || same) {
    // SAME means in * stride pixels, or all where the kernel does not reach so far.
    axis->out =
        a.output_shape_count ? axis->output_shape : std::min(axis->in * axis->stride, whole);
    // What a strided Conv of that output would drop again may be missing, but no more.
    if (axis->out - whole >= axis->stride) {
      fail(MP_INVALID, "ConvTranspose: output_shape holds ", axis->out, ", but ", axis->in,
           " pixels with stride ", axis->stride, " and a kernel that reaches over ", reach,
           " give at most ", whole + axis->stride - 1);
    }
    distribute(clamp_to_zero(whole - axis->out), a.auto_pad == MP_SAME_UPPER, axis);
    return;
  }
  if (a.auto_pad == MP_VALID) axis->pad_begin = axis->pad_end = 0;
  axis->out = whole - axis->pad_begin - axis->pad_end;
  if (axis->out < 0) {
    fail(MP_INVALID, "ConvTranspose: pads of ", axis->pad_begin, " and ", axis->pad_end,
         " leave nothing of ", whole, " output pixels");
  }
}

int64_t product_of(std::initializer_list<int64_t> sizes, const char* what) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) fail(MP_INVALID, what, " is too large");
  }
  return product;
}

bool is_pointwise(const mp_conv& c) {
  if (c.transposed || (c.groups > 1 && c.bias)) return false;
  for (int i = 0; i < kAxes; ++i) {
    if (c.kernel[i] != 1 || c.stride[i] != 1 || c.pad[i] != 0 || c.out[i] != c.in[i]) return false;
  }
  return c.c > 1 || c.groups == 1;  // depthwise: no product at all
}

void form_product(const mp_conv& c, Element element, Convolution* out) {
  const int64_t pixels = out_pixels(c);
  const auto shape = [](std::initializer_list<int64_t> dims) {
    Shape s;
    for (int64_t dim : dims) s.dims[s.rank++] = dim;
    return s;
  };
  if (pixels == 1 && c.groups == 1) {  // rows of X are images
    GemmAttributes attributes;
    attributes.trans_b = true;
    gemm_product(shape({c.n, c.c}), shape({c.k, c.c}), nullptr, attributes, element, &out->product);
    if (c.bias) add_vector_bias(&out->product, false);
    out->w_is_a = out->product.swapped;
    return;
  }
  if (c.groups == 1) {
    matmul_product(shape({c.k, c.c}), shape({c.n, c.c, pixels}), false, element, &out->product);
  } else {
    matmul_product(shape({c.groups, c.k, c.c}), shape({c.n, c.groups, c.c, pixels}), false, element,
                   &out->product);
  }
  if (c.bias) add_vector_bias(&out->product, true);
  out->w_is_a = !out->product.swapped;
}

}  // namespace

int64_t out_pixels(const mp_conv& c) { return c.out[0] * c.out[1] * c.out[2]; }

int64_t kernel_taps(const mp_conv& c) { return c.kernel[0] * c.kernel[1] * c.kernel[2]; }

bool Convolution::empty() const {
  for (int i = 0; i < output.rank; ++i) {
    if (output.dims[i] == 0) return true;
  }
  return false;
}

void conv_of_weight(const Shape& w, const mp_conv_attributes& a, Element element, mp_conv* out) {
  mp_conv& c = *out;
  c = mp_conv{};
  c.dtype = element.dtype;
  c.precision = element.dtype == MP_F32 ? element.precision : MP_TF32;
  c.transposed = a.transposed;
  c.n = 1;
  c.groups = a.group;
  c.c = a.transposed ? w.dims[0] / a.group : w.dims[1];
  c.k = a.transposed ? w.dims[1] : w.dims[0] / a.group;
  const int axes = w.rank - 2;
  for (int i = 0; i < kAxes; ++i) {
    c.in[i] = c.out[i] = c.stride[i] = c.dilation[i] = 1;
    c.kernel[i] = i < kAxes - axes ? 1 : w.dims[2 + i - (kAxes - axes)];
  }
  const int64_t taps = product_of({c.kernel[0], c.kernel[1], c.kernel[2]}, "W");
  c.w_w = 1;
  c.w_h = c.kernel[2];
  c.w_c = a.transposed ? product_of({c.k, taps}, "W") : taps;
  c.w_k = a.transposed ? taps : product_of({c.c, taps}, "W");
  c.w_g = product_of({c.c, c.k, taps}, "W");
  if (taps == 1 && !a.transposed && c.c * element_bytes(c.dtype) % 16 == 0) {
    // As ONNX stores it, it is stored for kernels of one tap, if it starts where 16 bytes do.
    c.w_taps = 1;
    c.w_w = c.w_h = c.w_g;
  }
}

void convolution(const Shape& x, const Shape& w, const Shape* bias, const mp_conv_attributes& a,
                 Element element, Convolution* out) {
  const char* const op = op_name(a);
  if (x.rank < 3 || x.rank > 2 + kAxes || w.rank != x.rank) {
    fail(MP_INVALID, op, ": X ", x.text(), " and W ", w.text(),
         " must have the same rank, 3 to 5 (1 to 3 spatial dimensions)");
  }
  const int axes = x.rank - 2;
  check_count(a, "kernel_shape", a.kernel_count, axes);
  check_count(a, "strides", a.stride_count, axes);
  check_count(a, "dilations", a.dilation_count, axes);
  check_count(a, "pads", a.pad_count, 2 * axes);
  check_count(a, "output_padding", a.output_padding_count, axes);
  check_count(a, "output_shape", a.output_shape_count, axes);
  check_least(a, "group", a.group, 1);
  if (a.auto_pad < MP_NOTSET || a.auto_pad > MP_VALID) {
    fail(MP_INVALID, op, ": the code ", a.auto_pad, " of auto_pad is unknown");
  }
  const int64_t channels = x.dims[1];
  // W is (outputs, channels of a group, ...), transposed (channels, outputs of a group, ...).
  const int64_t fits = a.transposed ? w.dims[0] : w.dims[1] * a.group;
  if (channels != fits || w.dims[0] % a.group) {
    fail(MP_INVALID, op, ": the channels of X ", x.text(), " and W ", w.text(),
         " do not fit each other in ", a.group, " groups");
  }
  const int64_t outputs = a.transposed ? w.dims[1] * a.group : w.dims[0];
  if (bias && (bias->rank != 1 || bias->dims[0] != outputs)) {
    fail(MP_INVALID, op, ": B ", bias->text(), " must be [", outputs,
         "], a value for each output "
         "channel of W ",
         w.text());
  }

  mp_conv& c = out->conv;
  conv_of_weight(w, a, element, &c);
  c.bias = bias != nullptr;
  c.n = x.dims[0];
  out->output.rank = x.rank;
  out->output.dims[0] = c.n;
  out->output.dims[1] = outputs;
  for (int i = 0; i < axes; ++i) {
    const int at = kAxes - axes + i;
    Axis axis{};
    axis.in = x.dims[2 + i];
    axis.kernel = w.dims[2 + i];
    if (a.kernel_count && a.kernel[i] != axis.kernel) {
      fail(MP_INVALID, op, ": kernel_shape says ", a.kernel[i], " where W ", w.text(), " has ",
           axis.kernel);
    }
    axis.stride = a.stride_count ? a.stride[i] : 1;
    axis.dilation = a.dilation_count ? a.dilation[i] : 1;
    axis.pad_begin = a.pad_count ? a.pad[i] : 0;
    axis.pad_end = a.pad_count ? a.pad[axes + i] : 0;
    axis.output_padding = a.output_padding_count ? a.output_padding[i] : 0;
    axis.output_shape = a.output_shape_count ? a.output_shape[i] : 0;
    check_least(a, "the kernel", axis.kernel, 1);
    check_least(a, "strides", axis.stride, 1);
    check_least(a, "dilations", axis.dilation, 1);
    check_least(a, "pads", axis.pad_begin, 0);
    check_least(a, "pads", axis.pad_end, 0);
    check_least(a, "output_padding", axis.output_padding, 0);
    check_least(a, "output_shape", axis.output_shape, 0);
    check_least(a, "X", axis.in, 0);
    (a.transposed ? resolve_transposed : resolve_forward)(a, &axis);
    c.in[at] = axis.in;
    c.out[at] = axis.out;
    c.stride[at] = axis.stride;
    c.dilation[at] = axis.dilation;
    c.pad[at] = axis.pad_begin;
    out->output.dims[2 + i] = axis.out;
  }
  out->pointwise = false;
  if (out->empty()) return;
  out->pointwise = is_pointwise(c);
  if (out->pointwise) {
    form_product(c, element, out);
    out->pointwise = out->product.loop_count == 0;
  }
  if (!out->pointwise) check_conv(c);
}

void check_conv(const mp_conv& c) {
  if (c.dtype < MP_F16 || c.dtype > MP_F32) fail(MP_INVALID, "dtype code ", c.dtype, " is unknown");
  if (c.precision < MP_TF32 || c.precision > MP_IEEE) {
    fail(MP_INVALID, "precision code ", c.precision, " is unknown");
  }
  if ((c.transposed | c.bias) & ~1) {
    fail(MP_INVALID, "transposed = ", c.transposed, ", bias = ", c.bias, " must be 0 or 1");
  }
  check_epilogue(c.activation, c.residual);
  if (c.w_taps != 0 && c.w_taps != 1 && c.w_taps != 4 && c.w_taps != 8) {
    fail(MP_INVALID, "W cannot be stored for ", c.w_taps,
         " taps at a time; 0, 1, 4 and 8 are known");
  }
  if (c.n < 0 || c.groups < 1 || c.c < 0 || c.k < 0) {
    fail(MP_INVALID, "n = ", c.n, ", groups = ", c.groups, ", c = ", c.c, ", k = ", c.k,
         " are impossible");
  }
  for (int i = 0; i < kAxes; ++i) {
    const bool legal =
        c.in[i] >= 0 && c.out[i] >= 0 && c.kernel[i] >= 1 && c.stride[i] >= 1 && c.dilation[i] >= 1;
    // What the kernels reach: below 2^30 on either side, so that no sum of two overflows.
    const auto small = [](int64_t a, int64_t b) {
      int64_t reach;
      return !__builtin_mul_overflow(a, b, &reach) && reach < kMaxCoordinate;
    };
    if (!legal || c.in[i] >= kMaxCoordinate || c.pad[i] >= kMaxCoordinate ||
        c.pad[i] <= -kMaxCoordinate || !small(c.kernel[i], c.dilation[i]) ||
        !small(c.out[i], c.transposed ? 1 : c.stride[i])) {
      fail(MP_INVALID, "axis ", i, ": in = ", c.in[i], ", out = ", c.out[i],
           ", kernel = ", c.kernel[i], ", stride = ", c.stride[i], ", dilation = ", c.dilation[i],
           ", pad = ", c.pad[i], " are impossible or reach beyond ", kMaxCoordinate, " pixels");
    }
  }
  const auto limit = [](int64_t count, const char* what) {
    if (count >= kMaxCount) {
      fail(MP_INVALID, "a convolution with ", count, " ", what, "; below ", kMaxCount,
           " are possible");
    }
  };
  limit(product_of({c.n, c.groups}, "batch"), "images times groups");
  limit(product_of({c.groups, c.k}, "Y"), "output channels");
  limit(product_of({c.in[0], c.in[1], c.in[2]}, "X"), "pixels in a channel of X");
  limit(product_of({c.out[0], c.out[1], c.out[2]}, "Y"), "pixels in a channel of Y");
  // Rounded up to whole K steps: at most 128 channels or 8 taps more.
  limit(product_of({c.c + 128, c.kernel[0], c.kernel[1], c.kernel[2] + 8}, "W"),
        "products to a sum");
  product_of({c.n, c.groups, c.c, c.in[0] * c.in[1] * c.in[2]}, "X");
  product_of({c.n, c.groups, c.k, out_pixels(c)}, "Y");
  const int64_t furthest = std::max({c.w_g, c.w_k, c.w_c, c.w_h, c.w_w});
  if (std::min({c.w_g, c.w_k, c.w_c, c.w_h, c.w_w}) < 0 || furthest >= (int64_t{1} << 44)) {
    fail(MP_INVALID, "the strides of W are impossible: ", c.w_g, ", ", c.w_k, ", ", c.w_c, ", ",
         c.w_h, ", ", c.w_w);
  }
}

}  // namespace moonpoly
