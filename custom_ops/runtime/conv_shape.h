// The shape rules of ONNX Conv and ConvTranspose, and their reduction to mp_conv, or to a matrix
// product where every output pixel has one input pixel.
#ifndef MOONPOLY_CONV_SHAPE_H_
#define MOONPOLY_CONV_SHAPE_H_

#include <cstdint>

#include "moonpoly.h"
#include "shape.h"

namespace moonpoly {

struct Convolution {
  Shape output;
  bool pointwise;   // `product` is the work, else `conv`
  bool w_is_a;      // of the product: A is W and B is X, else the reverse
  Product product;  // complete but for its alignment
  mp_conv conv;     // of W as ONNX stores it; also where it is a product, unless that is huge

  bool empty() const;
};

// `bias` may be null. Throws Error(MP_INVALID) naming the shapes or the attribute.
void convolution(const Shape& x, const Shape& w, const Shape* bias,
                 const mp_conv_attributes& attributes, Element element, Convolution* out);

// What W alone tells of it: groups, c, k, kernel and strides; all else as for a single pixel.
void conv_of_weight(const Shape& w, const mp_conv_attributes& attributes, Element element,
                    mp_conv* out);

// Checks sizes and codes of a convolution that came from outside. Throws Error(MP_INVALID).
void check_conv(const mp_conv& conv);

int64_t out_pixels(const mp_conv& conv);
int64_t kernel_taps(const mp_conv& conv);

}  // namespace moonpoly
#endif  // MOONPOLY_CONV_SHAPE_H_
