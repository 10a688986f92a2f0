// The part of ONNX Runtime's C interface that this library uses, declared by hand because no
// package ships the header. The function table only ever grows, so that each slot is fixed for
// good; the numbers were checked with offsetof against the header of API 29. API 22 (ONNX
// Runtime 1.22) is asked for.
#ifndef MOONPOLY_ORT_ABI_H_
#define MOONPOLY_ORT_ABI_H_

#include <cstddef>
#include <cstdint>

namespace moonpoly {

constexpr uint32_t kOrtApiVersion = 22;
constexpr int kShapeReferenceVersion = 24;  // of the API that lends a tensor's dimensions

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtAllocator;
struct OrtMemoryInfo;
struct OrtLogger;
struct OrtApi;
struct OrtCustomOp;

enum OrtErrorCode : int { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_EP_FAIL = 11 };
enum OrtMemType : int { OrtMemTypeDefault = 0 };
enum OrtLoggingLevel : int { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtCharacteristic : int { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL = 1 };
enum OnnxType : int { ONNX_UNDEFINED = 0, ONNX_FLOAT = 1, ONNX_FLOAT16 = 10, ONNX_BFLOAT16 = 16 };

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

using OrtFn = void (*)();  // a slot that is not used

struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* text);
  OrtFn unused_1;
  const char* (*GetErrorMessage)(const OrtStatus* status);
  OrtFn unused_3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  OrtFn unused_29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out);
  OrtFn unused_52[5];
  OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** out);
  OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* info, OnnxType type);
  OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo* info, const int64_t* dims, size_t count);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, OnnxType* out);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count);
  OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo* info, const char** names,
                                      size_t count);
  OrtFn unused_64;
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);
  OrtFn unused_66[6];
  OrtStatus* (*MemoryInfoGetId)(const OrtMemoryInfo* info, int* out);
  OrtFn unused_73[3];
  OrtStatus* (*AllocatorFree)(OrtAllocator* allocator, void* pointer);
  OrtStatus* (*AllocatorGetInfo)(const OrtAllocator* allocator, const OrtMemoryInfo** out);
  OrtFn unused_78[7];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name,
                                             float* out);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo* info, const char* name,
                                             int64_t* out);
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo* info, const char* name,
                                              char* out, size_t* bytes);
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext* context, size_t* out);
  OrtFn unused_89;
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index,
                                       const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index,
                                        const int64_t* dims, size_t count, OrtValue** out);
  OrtFn unused_92;
  void (*ReleaseStatus)(OrtStatus* status);
  OrtFn unused_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);
  OrtFn unused_100[25];
  OrtStatus* (*GetAvailableProviders)(char*** names, int* count);
  OrtStatus* (*ReleaseAvailableProviders)(char** names, int count);
  OrtFn unused_127[3];
  OrtStatus* (*AddSessionConfigEntry)(OrtSessionOptions* options, const char* key,
                                      const char* value);
  OrtFn unused_131;
  void (*ReleaseAllocator)(OrtAllocator* allocator);
  OrtFn unused_133[30];
  OrtStatus* (*KernelInfoGetAttributeArray_int64)(const OrtKernelInfo* info, const char* name,
                                                  int64_t* out, size_t* count);
  OrtFn unused_164[29];
  OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext* context, void** out);
  OrtFn unused_194[43];
  OrtStatus* (*HasSessionConfigEntry)(const OrtSessionOptions* options, const char* key, int* out);
  OrtStatus* (*GetSessionConfigEntry)(const OrtSessionOptions* options, const char* key,
                                      char* value, size_t* bytes);
  OrtFn unused_239[5];
  OrtStatus* (*KernelInfo_GetNodeName)(const OrtKernelInfo* info, char* name, size_t* bytes);
  OrtStatus* (*KernelInfo_GetLogger)(const OrtKernelInfo* info, const OrtLogger** out);
  OrtFn unused_246;
  OrtStatus* (*Logger_LogMessage)(const OrtLogger* logger, OrtLoggingLevel level, const char* text,
                                  const char* file, int line, const char* function);
  OrtFn unused_248;
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo* info, size_t index,
                                                  int* is_constant, const OrtValue** out);
  OrtFn unused_250[18];
  OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext* context,
                                                    size_t index, OrtTensorTypeAndShapeInfo** out);
  OrtFn unused_269;
  OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext* context,
                                                     size_t index,
                                                     const OrtTensorTypeAndShapeInfo* info);
  OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo* info, const char** names,
                                      size_t count);
  OrtFn unused_272[5];
  OrtStatus* (*KernelContext_GetScratchBuffer)(const OrtKernelContext* context,
                                               const OrtMemoryInfo* memory, size_t bytes,
                                               void** out);
  OrtStatus* (*KernelInfoGetAllocator)(const OrtKernelInfo* info, OrtMemType type,
                                       OrtAllocator** out);
  OrtFn unused_279[135];
  // From API 24 on: the table of an earlier runtime ends before it.
  OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(const OrtValue* value, OnnxType* type,
                                                          const int64_t** dims, size_t* rank);
};

#define MOONPOLY_SLOT(name, number) \
  static_assert(offsetof(OrtApi, name) == (number) * sizeof(void*), #name)
MOONPOLY_SLOT(CreateCustomOpDomain, 26);
MOONPOLY_SLOT(AddCustomOpDomain, 28);
MOONPOLY_SLOT(GetTensorMutableData, 51);
MOONPOLY_SLOT(CreateTensorTypeAndShapeInfo, 57);
MOONPOLY_SLOT(SetTensorElementType, 58);
MOONPOLY_SLOT(SetDimensions, 59);
MOONPOLY_SLOT(GetTensorElementType, 60);
MOONPOLY_SLOT(GetDimensionsCount, 61);
MOONPOLY_SLOT(GetSymbolicDimensions, 63);
MOONPOLY_SLOT(GetTensorTypeAndShape, 65);
MOONPOLY_SLOT(MemoryInfoGetId, 72);
MOONPOLY_SLOT(AllocatorGetInfo, 77);
MOONPOLY_SLOT(KernelInfoGetAttribute_float, 85);
MOONPOLY_SLOT(KernelInfoGetAttribute_string, 87);
MOONPOLY_SLOT(KernelContext_GetInputCount, 88);
MOONPOLY_SLOT(KernelContext_GetOutput, 91);
MOONPOLY_SLOT(ReleaseStatus, 93);
MOONPOLY_SLOT(ReleaseTensorTypeAndShapeInfo, 99);
MOONPOLY_SLOT(GetAvailableProviders, 125);
MOONPOLY_SLOT(AddSessionConfigEntry, 130);
MOONPOLY_SLOT(ReleaseAllocator, 132);
MOONPOLY_SLOT(KernelInfoGetAttributeArray_int64, 163);
MOONPOLY_SLOT(KernelContext_GetGPUComputeStream, 193);
MOONPOLY_SLOT(HasSessionConfigEntry, 237);
MOONPOLY_SLOT(KernelInfo_GetNodeName, 244);
MOONPOLY_SLOT(Logger_LogMessage, 247);
MOONPOLY_SLOT(KernelInfoGetConstantInput_tensor, 249);
MOONPOLY_SLOT(ShapeInferContext_GetInputTypeShape, 268);
MOONPOLY_SLOT(ShapeInferContext_SetOutputTypeShape, 270);
MOONPOLY_SLOT(SetSymbolicDimensions, 271);
MOONPOLY_SLOT(KernelContext_GetScratchBuffer, 277);
MOONPOLY_SLOT(KernelInfoGetAllocator, 278);
MOONPOLY_SLOT(GetTensorElementTypeAndShapeDataReference, 414);
#undef MOONPOLY_SLOT

// What ONNX Runtime calls. Members up to GetEndVersion exist since API 17, the last four since 18.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  OnnxType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  OnnxType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                               void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
  size_t (*GetMayInplace)(int** input, int** output);
  void (*ReleaseMayInplace)(int* input, int* output);
  size_t (*GetAliasMap)(int** input, int** output);
  void (*ReleaseAliasMap)(int* input, int* output);
};
static_assert(sizeof(OrtCustomOp) == 208, "as in API 22 to 29");

}  // namespace moonpoly
#endif  // MOONPOLY_ORT_ABI_H_
