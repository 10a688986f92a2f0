#include "ort.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace moonpoly {

Ort::Ort(const OrtApi* api, const char* version) : api_(api) {
  const char* dot = std::strchr(version, '.');
  lends_shapes_ = std::atoi(version) == 1 && dot && std::atoi(dot + 1) >= kShapeReferenceVersion;
}

bool Ort::tensor(const OrtValue* value, Shape* shape, void** data) const {
  size_t rank = 0;
  if (lends_shapes_) {  // 6 ns; a copy to be freed takes four calls and 100 ns
    OnnxType type;
    const int64_t* dims = nullptr;
    (*this)(api_->GetTensorElementTypeAndShapeDataReference(value, &type, &dims, &rank));
    std::copy_n(dims, std::min<size_t>(rank, kMaxRank), shape->dims);
  } else {
    copy_shape(value, shape, &rank);
  }
  shape->rank = static_cast<int>(rank);
  if (rank > kMaxRank) return false;
  (*this)(api_->GetTensorMutableData(const_cast<OrtValue*>(value), data));
  return true;
}

void Ort::copy_shape(const OrtValue* value, Shape* shape, size_t* rank) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  (*this)(api_->GetTensorTypeAndShape(value, &info));
  OrtStatus* status = api_->GetDimensionsCount(info, rank);
  if (!status && *rank <= kMaxRank) status = api_->GetDimensions(info, shape->dims, *rank);
  api_->ReleaseTensorTypeAndShapeInfo(info);
  (*this)(status);
}

std::string Ort::text_attribute(const OrtKernelInfo* info, const char* name) const {
  size_t bytes = 0;
  found(api_->KernelInfoGetAttribute_string(info, name, nullptr, &bytes));
  std::string value(bytes, '\0');
  if (bytes) found(api_->KernelInfoGetAttribute_string(info, name, value.data(), &bytes));
  return value.c_str();  // without the terminator
}

int Ort::list_attribute(const OrtKernelInfo* info, const char* name, int64_t* out, int room) const {
  size_t count = 0;
  found(api_->KernelInfoGetAttributeArray_int64(info, name, nullptr, &count));
  if (count > 0 && count <= static_cast<size_t>(room)) {
    (*this)(api_->KernelInfoGetAttributeArray_int64(info, name, out, &count));
  }
  return static_cast<int>(count);
}

std::string Ort::node_name(const OrtKernelInfo* info) const {
  size_t bytes = 0;
  found(api_->KernelInfo_GetNodeName(info, nullptr, &bytes));
  std::string name(bytes, '\0');
  if (bytes) found(api_->KernelInfo_GetNodeName(info, name.data(), &bytes));
  return name.c_str();  // without the terminator
}

void Ort::warn(const OrtKernelInfo* info, const std::string& text) const {
  const OrtLogger* logger = nullptr;
  found(api_->KernelInfo_GetLogger(info, &logger));
  if (!logger) return;
  found(api_->Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, text.c_str(), "moonpoly", 0,
                                "CreateKernel"));
}

}  // namespace moonpoly
