// The shape rules of ONNX MatMul and Gemm, and their reduction to the canonical product
// (mp_problem).
#ifndef MOONPOLY_SHAPE_H_
#define MOONPOLY_SHAPE_H_

#include <cstdint>
#include <string>

#include "moonpoly.h"

namespace moonpoly {

constexpr int kMaxRank = 32;

struct Shape {
  int rank = 0;
  int64_t dims[kMaxRank];

  std::string text() const;  // "[2, 3]"
};

// Batch groups that the problem's two maps cannot express; the caller launches the problem once for
// each of their entries, moving the operands by these strides (elements).
struct OuterLoop {
  int64_t count, a_stride, b_stride, y_stride;
};

struct Product {
  mp_problem problem;
  bool swapped;  // the problem's A is the op's B and the reverse
  Shape output;
  int loop_count;
  OuterLoop loops[kMaxRank];  // innermost first

  bool empty() const { return problem.m == 0 || problem.n == 0 || problem.batch == 0; }
};

// Kind of arithmetic of the whole op.
struct Element {
  int32_t dtype, precision;
};

struct GemmAttributes {
  bool trans_a = false, trans_b = false;
  float alpha = 1, beta = 1;
};

// numpy.matmul's rules: 1-D operands, broadcast batch axes; `trans_b`: the last two axes of B
// change places first. Throws Error(MP_INVALID) naming both shapes.
void matmul_product(const Shape& a, const Shape& b, bool trans_b, Element element, Product* out);

// `c` may be null. Throws Error(MP_INVALID) naming the shapes.
void gemm_product(const Shape& a, const Shape& b, const Shape* c, const GemmAttributes& attributes,
                  Element element, Product* out);

// Adds one value for each row of Y (`along_m`) or for each column, whether or not the product is
// swapped.
void add_vector_bias(Product* product, bool along_m);

// The bias of the op `name`, which is added `beta` times, must have one dimension, the columns of
// B. Throws Error(MP_INVALID) naming the shapes.
void add_column_bias(const std::string& name, const Shape& bias, const Shape& b, float beta,
                     Product* product);

// Makes an output column of two neighbouring columns of the matrix B. Throws Error(MP_INVALID)
// naming its shape where it is no matrix or has an odd number of columns.
void gate_columns(const std::string& name, const Shape& b, Product* product);

// R of the op `name` must have the output's shape. Throws Error(MP_INVALID) naming both, and
// what to do about it.
void check_residual(const std::string& name, const Shape& residual, const Shape& output);

// Fills align_*: what base address, row length and pitch, batch and loop strides all have in
// common. Addresses of the problem's A and B, that is, after `swapped`; `residual` may be null.
void set_alignment(Product* product, const void* a, const void* b, const void* y,
                   const void* residual = nullptr);

}  // namespace moonpoly
#endif  // MOONPOLY_SHAPE_H_
