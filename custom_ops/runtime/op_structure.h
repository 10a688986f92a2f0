// The operators of domain ai.moonpoly by their names, which tell what each computes, in order of
// application: a product or convolution, a tensor R added to it, an activation, R added to or
// multiplied with that; or of a gated product, which has two columns for each of its output, the
// activation of the even ones. One name, one ONNX function body.
#ifndef MOONPOLY_OP_STRUCTURE_H_
#define MOONPOLY_OP_STRUCTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "moonpoly.h"
#include "ort.h"

namespace moonpoly {

enum class OpBase {
  kMatMul,
  kMatMulBias,        // a third input of one value for each column
  kScaledMatMul,      // times alpha
  kScaledMatMulBias,  // and the third input times beta
  kMatMulGated,
  kMatMulGatedBias,
  kMatMulToFloat,  // of 16-bit types
  kMatMulBiasToFloat,
  kMatMulTransposed,  // by a B whose last two axes are exchanged, times alpha
  kGemm,
  kGemmToFloat,
  kConv,
  kConvNoBias,  // a third input is not even optional
  kConvTranspose,
  kConvTransposeNoBias
};

struct OpStructure {
  OpBase base;
  int32_t activation, residual;  // mp_activation, mp_residual
  std::string name;

  bool gemm() const { return base == OpBase::kGemm || base == OpBase::kGemmToFloat; }
  bool gated() const { return base == OpBase::kMatMulGated || base == OpBase::kMatMulGatedBias; }
  // Its output is fp32, whatever it multiplies.
  bool wide() const {
    return base == OpBase::kMatMulToFloat || base == OpBase::kMatMulBiasToFloat ||
           base == OpBase::kGemmToFloat;
  }
  // Whether B is transposed by the attribute perm.
  bool turned() const { return base == OpBase::kMatMulTransposed; }
  bool convolves() const { return base >= OpBase::kConv; }
  bool transposed() const { return base >= OpBase::kConvTranspose; }
  bool has_bias() const { return base_inputs() == 3; }
  // Whether the third input is the vector that the name promises.
  bool needs_bias() const {
    return base == OpBase::kMatMulBias || base == OpBase::kScaledMatMulBias ||
           base == OpBase::kMatMulGatedBias || base == OpBase::kMatMulBiasToFloat;
  }
  // Whether attributes alpha and beta scale the product and the third input.
  bool scales() const {
    return gemm() || turned() || base == OpBase::kScaledMatMul || base == OpBase::kScaledMatMulBias;
  }
  // How many inputs come before R, which is the last.
  int base_inputs() const;
  int inputs() const { return base_inputs() + (residual != MP_RESIDUAL_NONE); }
};

// All of them: addresses stay valid.
const std::vector<OpStructure>& op_structures();

// What follows the product in one node.
struct Epilogue {
  int32_t activation = MP_ACT_NONE, residual = MP_RESIDUAL_NONE;
  float alpha = 0, beta = 0;

  // Problem: mp_problem or mp_conv.
  template <typename Problem>
  void fill(Problem* problem) const {
    problem->activation = activation;
    problem->residual = residual;
    problem->act_alpha = alpha;
    problem->act_beta = beta;
  }
};

// Of a node, with the numbers among its attributes; ONNX's defaults where it has none.
Epilogue read_epilogue(const Ort& ort, const OrtKernelInfo* info, const OpStructure& structure);

// Checks codes that came from outside. Throws Error(MP_INVALID).
void check_epilogue(int32_t activation, int32_t residual);

// As a kernel's parameter MP_P_ACTIVATION.
inline int32_t epilogue_code(const mp_problem& p) {
  return p.activation | p.residual << 8 | p.gated << 16 | p.wide << 17;
}
inline int32_t epilogue_code(const mp_conv& conv) { return conv.activation | conv.residual << 8; }

}  // namespace moonpoly
#endif  // MOONPOLY_OP_STRUCTURE_H_
