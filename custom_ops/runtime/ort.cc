#include "ort.h"

namespace moonpoly {

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
