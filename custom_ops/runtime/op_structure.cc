#include "op_structure.h"

#include <limits>

#include "error.h"

namespace moonpoly {
namespace {

struct Activation {
  const char* name;
  int uses;           // of activation_alpha and activation_beta: 0, 1 or 2
  float alpha, beta;  // where the node does not say
};

constexpr float kLargest = std::numeric_limits<float>::max();
// In the order of mp_activation.
constexpr Activation kActivations[] = {{"", 0, 0, 0},
                                       {"Relu", 0, 0, 0},
                                       {"LeakyRelu", 1, 0.01f, 0},
                                       {"Clip", 2, -kLargest, kLargest},
                                       {"Sigmoid", 0, 0, 0},
                                       {"Tanh", 0, 0, 0},
                                       {"HardSigmoid", 2, 0.2f, 0.5f},
                                       {"HardSwish", 0, 0, 0},
                                       {"Gelu", 0, 0, 0},
                                       {"GeluTanh", 0, 0, 0},
                                       {"QuickGelu", 1, 1.702f, 0},
                                       {"Silu", 0, 0, 0}};
constexpr int32_t kActivationCount = sizeof kActivations / sizeof *kActivations;
static_assert(kActivationCount == MP_ACT_SILU + 1, "one for each code");

std::string name_of(const char* base, int32_t activation, int32_t residual) {
  std::string name = base;
  if (residual == MP_RESIDUAL_BEFORE) name += "Add";
  name += kActivations[activation].name;
  if (residual == MP_RESIDUAL_AFTER) name += "Add";
  if (residual == MP_RESIDUAL_MULTIPLIED) name += "Mul";
  return name;
}

std::vector<OpStructure> all_structures() {
  constexpr struct {
    OpBase base;
    const char* name;
  } kBases[] = {{OpBase::kMatMul, "MatMul"},
                {OpBase::kMatMulBias, "MatMulBias"},
                {OpBase::kScaledMatMul, "ScaledMatMul"},
                {OpBase::kScaledMatMulBias, "ScaledMatMulBias"},
                {OpBase::kMatMulGated, "MatMulGated"},
                {OpBase::kMatMulGatedBias, "MatMulGatedBias"},
                {OpBase::kMatMulToFloat, "MatMulToFloat"},
                {OpBase::kMatMulBiasToFloat, "MatMulBiasToFloat"},
                {OpBase::kMatMulTransposed, "MatMulTransposed"},
                {OpBase::kGemm, "Gemm"},
                {OpBase::kGemmToFloat, "GemmToFloat"},
                {OpBase::kConv, "Conv"},
                {OpBase::kConvNoBias, "ConvNoBias"},
                {OpBase::kConvTranspose, "ConvTranspose"},
                {OpBase::kConvTransposeNoBias, "ConvTransposeNoBias"}};
  std::vector<OpStructure> all;
  for (const auto& [base, name] : kBases) {
    const auto add = [&all, base = base, name = name](int32_t activation, int32_t residual) {
      all.push_back({base, activation, residual, name_of(name, activation, residual)});
    };
    const OpStructure plain{base, 0, 0, ""};
    if (plain.wide() || plain.turned()) {
      add(MP_ACT_NONE, MP_RESIDUAL_NONE);
      continue;
    }
    for (int32_t activation = MP_ACT_NONE; activation < kActivationCount; ++activation) {
      add(activation, MP_RESIDUAL_NONE);
      if (plain.transposed() || plain.gated()) continue;
      add(activation, MP_RESIDUAL_BEFORE);
      if (plain.convolves() && activation) add(activation, MP_RESIDUAL_AFTER);
    }
    if (!plain.convolves() && !plain.gated()) add(MP_ACT_NONE, MP_RESIDUAL_MULTIPLIED);
  }
  return all;
}

}  // namespace

int OpStructure::base_inputs() const {
  switch (base) {
    case OpBase::kMatMul:
    case OpBase::kScaledMatMul:
    case OpBase::kMatMulGated:
    case OpBase::kMatMulToFloat:
    case OpBase::kMatMulTransposed:
    case OpBase::kConvNoBias:
    case OpBase::kConvTransposeNoBias:
      return 2;
    default:
      return 3;
  }
}

const std::vector<OpStructure>& op_structures() {
  static const auto& all = *new std::vector<OpStructure>(all_structures());
  return all;
}

Epilogue read_epilogue(const Ort& ort, const OrtKernelInfo* info, const OpStructure& structure) {
  const Activation& activation = kActivations[structure.activation];
  Epilogue out{structure.activation, structure.residual, 0, 0};
  if (activation.uses > 0) {
    out.alpha = ort.attribute(info, "activation_alpha", activation.alpha);
  }
  if (activation.uses > 1) out.beta = ort.attribute(info, "activation_beta", activation.beta);
  return out;
}

void check_epilogue(int32_t activation, int32_t residual) {
  if (activation < MP_ACT_NONE || activation >= kActivationCount) {
    fail(MP_INVALID, "activation code ", activation, " is unknown");
  }
  if (residual < MP_RESIDUAL_NONE || residual > MP_RESIDUAL_MULTIPLIED) {
    fail(MP_INVALID, "residual code ", residual, " is unknown");
  }
}

}  // namespace moonpoly
