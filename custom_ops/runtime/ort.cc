#include "ort.h"

namespace moonpoly {

bool Ort::tensor(const OrtValue* value, Shape* shape, void** data) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  (*this)(api_->GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = api_->GetDimensionsCount(info, &rank);
  if (!status && rank <= kMaxRank) status = api_->GetDimensions(info, shape->dims, rank);
  api_->ReleaseTensorTypeAndShapeInfo(info);
  (*this)(status);
  shape->rank = static_cast<int>(rank);
  if (rank > kMaxRank) return false;
  (*this)(api_->GetTensorMutableData(const_cast<OrtValue*>(value), data));
  return true;
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
