// The custom ops ai.moonpoly.Conv, ConvTranspose, and ConvNoBias, ConvTransposeNoBias for nodes of
// two inputs, and those with epilogues, as ONNX Runtime sees them.
#ifndef MOONPOLY_CONV_OP_H_
#define MOONPOLY_CONV_OP_H_

#include <memory>

#include "ops.h"

namespace moonpoly {

// One op for one dtype; lives as long as an Op.
//
// It has no InferOutputShapeFn: ONNX Runtime reads the type of every input before it asks, and an
// absent B has none; and sizes that follow from a symbolic one cannot be expressed there.
struct ConvOp : NodeOp {
  // `structure`: one of convolutions, from op_structures().
  ConvOp(const Ort& ort, const OpStructure& structure, int32_t dtype,
         std::shared_ptr<const Settings> settings);
};

}  // namespace moonpoly
#endif  // MOONPOLY_CONV_OP_H_
