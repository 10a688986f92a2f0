#include "shape_inference.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ort.h"

namespace moonpoly {
namespace {

struct Dim {
  int64_t value;     // -1: not known
  const char* name;  // "" if it has none

  bool known() const { return value >= 0 || *name; }
  bool is(int64_t x) const { return value == x; }
};

using Dims = std::vector<Dim>;

const OrtTensorTypeAndShapeInfo* input_info(const Ort& ort, const OrtShapeInferContext* context,
                                            size_t index) {
  OrtTensorTypeAndShapeInfo* info = nullptr;  // stays the context's
  ort(ort->ShapeInferContext_GetInputTypeShape(context, index, &info));
  return info;
}

// Empty where the rank is not known; a scalar looks the same and is no operand of MatMul.
Dims input_dims(const Ort& ort, const OrtTensorTypeAndShapeInfo* info) {
  size_t rank = 0;
  ort(ort->GetDimensionsCount(info, &rank));
  std::vector<int64_t> values(rank);
  std::vector<const char*> names(rank, "");
  ort(ort->GetDimensions(info, values.data(), rank));
  ort(ort->GetSymbolicDimensions(info, names.data(), rank));
  Dims dims;
  for (size_t i = 0; i < rank; ++i) dims.push_back({values[i], names[i] ? names[i] : ""});
  return dims;
}

// The broadcast of two batch dimensions, or a dimension that is not known.
Dim broadcast(const Dim& a, const Dim& b) {
  if (a.is(1)) return b;
  if (b.is(1)) return a;
  if (a.value >= 0) return a;  // b is the same, or 1 at run time
  if (b.value >= 0) return b;
  const bool same = *a.name && std::string(a.name) == b.name;
  return same ? a : Dim{-1, ""};
}

std::optional<Dims> matmul_dims(const Dims& a, const Dims& b) {
  if (a.empty() || b.empty()) return std::nullopt;
  const size_t a_axes = a.size() < 2 ? 0 : a.size() - 2, b_axes = b.size() < 2 ? 0 : b.size() - 2;
  const size_t axes = std::max(a_axes, b_axes);
  Dims out;
  for (size_t i = 0; i < axes; ++i) {
    const Dim one{1, ""};
    const Dim& from_a = i + a_axes < axes ? one : a[i + a_axes - axes];
    const Dim& from_b = i + b_axes < axes ? one : b[i + b_axes - axes];
    out.push_back(broadcast(from_a, from_b));
  }
  if (a.size() > 1) out.push_back(a[a.size() - 2]);
  if (b.size() > 1) out.push_back(b.back());
  for (const Dim& dim : out) {
    if (!dim.known()) return std::nullopt;
  }
  return out;
}

}  // namespace

OrtStatus* infer_matmul_shape(const Ort& ort, OrtShapeInferContext* context,
                              const OpStructure& structure) {
  return guarded(ort.api(), [&] {
    const auto* a = input_info(ort, context, 0);
    Dims b = input_dims(ort, input_info(ort, context, 1));
    if (structure.turned()) {
      if (b.size() < 2) return;
      std::swap(b[b.size() - 1], b[b.size() - 2]);
    }
    auto out = matmul_dims(input_dims(ort, a), b);
    OnnxType type = ONNX_UNDEFINED;
    ort(ort->GetTensorElementType(a, &type));
    if (!out || type == ONNX_UNDEFINED) return;
    if (structure.gated()) {
      if (out->back().value < 0) return;
      out->back().value /= 2;
    }
    if (structure.wide()) type = ONNX_FLOAT;
    std::vector<int64_t> values;
    std::vector<const char*> names;
    for (const Dim& dim : *out) {
      values.push_back(dim.value);
      names.push_back(dim.value >= 0 ? "" : dim.name);
    }
    OrtTensorTypeAndShapeInfo* info = nullptr;
    ort(ort->CreateTensorTypeAndShapeInfo(&info));
    OrtStatus* status = ort->SetTensorElementType(info, type);
    if (!status) status = ort->SetDimensions(info, values.data(), values.size());
    if (!status) status = ort->SetSymbolicDimensions(info, names.data(), names.size());
    if (!status) status = ort->ShapeInferContext_SetOutputTypeShape(context, 0, info);
    ort->ReleaseTensorTypeAndShapeInfo(info);
    ort(status);
  });
}

}  // namespace moonpoly
