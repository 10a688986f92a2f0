// The CUDA driver, found at run time, so that one binary loads on machines with and without a GPU.
// The few types and constants are declared here because the build needs no CUDA headers; their
// values are part of the driver's stable binary interface (cuda.h of CUDA 12 and 13).
#ifndef MOONPOLY_DRIVER_H_
#define MOONPOLY_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "moonpoly.h"

namespace moonpoly {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

enum : int {
  CU_TENSOR_MAP_FLOAT16 = 6,
  CU_TENSOR_MAP_FLOAT32 = 7,
  CU_TENSOR_MAP_BFLOAT16 = 9,
  CU_TENSOR_MAP_TFLOAT32 = 11,
};
enum : int { CU_TENSOR_MAP_L2_PROMOTION_128B = 2 };
enum : int { CU_FUNC_MAX_DYNAMIC_SHARED = 8 };
enum : int { CU_STREAM_CAPTURE_NONE = 0 };
// CU_STREAM_PER_THREAD: one handle that means another stream in every thread.
inline CUstream per_thread_stream() { return reinterpret_cast<CUstream>(uintptr_t{2}); }
enum : int { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

struct CUlaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    int allowed;
  } value;
};
struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  CUstream stream;
  const CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*Init)(unsigned flags);
  CUresult (*DriverGetVersion)(int* version);
  CUresult (*DeviceGetCount)(int* count);
  CUresult (*DeviceGet)(CUdevice* device, int ordinal);
  CUresult (*DeviceGetName)(char* name, int bytes, CUdevice device);
  CUresult (*DeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*DeviceTotalMem)(size_t* bytes, CUdevice device);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*DevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*CtxGetCurrent)(CUcontext* context);
  CUresult (*CtxPushCurrent)(CUcontext context);
  CUresult (*CtxPopCurrent)(CUcontext* context);
  CUresult (*ModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*ModuleUnload)(CUmodule module);
  CUresult (*ModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*FuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*LaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                           CUstream stream, void** params, void** extra);
  // Launches a kernel before the one in front of it has ended. Null before CUDA 12.3, whose graphs
  // are the first to keep such launches when they are captured.
  CUresult (*LaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params,
                             void** extra);
  CUresult (*MemAlloc)(CUdeviceptr* pointer, size_t bytes);
  CUresult (*MemFree)(CUdeviceptr pointer);
  CUresult (*PointerGetAttribute)(void* value, int attribute, CUdeviceptr pointer);
  CUresult (*MemcpyDtoH)(void* to, CUdeviceptr from, size_t bytes);
  CUresult (*MemcpyHtoD)(CUdeviceptr to, const void* from, size_t bytes);
  CUresult (*MemsetD32)(CUdeviceptr pointer, unsigned value, size_t count);
  CUresult (*MemsetD32Async)(CUdeviceptr pointer, unsigned value, size_t count, CUstream stream);
  CUresult (*StreamSynchronize)(CUstream stream);
  CUresult (*StreamIsCapturing)(CUstream stream, int* status);
  CUresult (*GetErrorName)(CUresult result, const char** name);
  CUresult (*GetErrorString)(CUresult result, const char** text);
  // Absent before CUDA 12; only kernels with tensor maps need it.
  CUresult (*TensorMapEncodeTiled)(CUtensorMap* map, int dtype, uint32_t rank, void* address,
                                   const uint64_t* dims, const uint64_t* strides,
                                   const uint32_t* box, const uint32_t* element_strides,
                                   int interleave, int swizzle, int l2_promotion, int oob_fill);
  // Absent before CUDA 12.4; loads a function's code now where the driver would do so lazily.
  CUresult (*FuncLoad)(CUfunction function);
};

// Loads and initialises the driver once. Throws Error(MP_NO_DRIVER).
const Driver& driver();
// The same without an exception: null where there is no usable driver, with the reason in `why`.
const Driver* try_driver(std::string* why);

// Throws Error(MP_CUDA) naming the call and the driver's own text.
void check(CUresult result, const char* what);

int device_count();  // 0 where there is no driver
void query_device(int ordinal, mp_device* out);

// A device's primary context, retained while this lives.
class PrimaryContext {
 public:
  explicit PrimaryContext(int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  CUcontext get() const { return context_; }

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// Makes a context current for a scope; costs one call where it is current already (ONNX Runtime's
// case).
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// Whether it lies on a GPU, as far as the driver knows.
bool is_device_memory(const void* address);

}  // namespace moonpoly
#endif  // MOONPOLY_DRIVER_H_
