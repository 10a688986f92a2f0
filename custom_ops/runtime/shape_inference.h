// Output shapes for ONNX Runtime's graph optimizers, which fuse less behind a node without one.
#ifndef MOONPOLY_SHAPE_INFERENCE_H_
#define MOONPOLY_SHAPE_INFERENCE_H_

#include "op_structure.h"
#include "ort_abi.h"

namespace moonpoly {

class Ort;

// The body of MatMul's InferOutputShapeFn. Sets a shape only if every dimension of it is known by
// value or by name; an unnamed unknown one cannot be expressed in this interface (it would become
// the value -1). The type of the elements is that of A and not of the op that is asked: ONNX
// Runtime asks one op on behalf of all that share its name. Gemm has none: ONNX Runtime reads the
// type of every input before it asks, and an absent C has none.
OrtStatus* infer_matmul_shape(const Ort& ort, OrtShapeInferContext* context,
                              const OpStructure& structure);

}  // namespace moonpoly
#endif  // MOONPOLY_SHAPE_INFERENCE_H_
