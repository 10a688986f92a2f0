#include "driver.h"

#include <dlfcn.h>

#include <cstring>

#include "error.h"

namespace moonpoly {
namespace {

// CUdevice_attribute values.
enum : int {
  kMaxThreadsPerSm = 39,
  kMaxSharedPerSm = 81,
  kMaxRegistersPerSm = 82,
  kMaxSharedPerBlock = 97,
  kMaxBlocksPerSm = 106,
  kClockKhz = 13,
  kSmCount = 16,
  kMemoryClockKhz = 36,
  kMemoryBusBits = 37,
  kL2Bytes = 38,
  kMajor = 75,
  kMinor = 76,
};

struct LoadedDriver {
  Driver api{};
  std::string failure;

  LoadedDriver() {
    // libcuda.so.1 is the driver's own name on Linux; already loaded by ONNX Runtime in its
    // sessions.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      failure = std::string("no CUDA driver: ") + dlerror();
      return;
    }
    const auto find = [&](auto& slot, const char* name, bool needed = true) {
      void* symbol = dlsym(library, name);
      std::memcpy(&slot, &symbol, sizeof symbol);
      if (!symbol && needed && failure.empty()) {
        failure = std::string("the CUDA driver is too old: it has no ") + name;
      }
    };
    find(api.Init, "cuInit");
    find(api.DriverGetVersion, "cuDriverGetVersion");
    find(api.DeviceGetCount, "cuDeviceGetCount");
    find(api.DeviceGet, "cuDeviceGet");
    find(api.DeviceGetName, "cuDeviceGetName");
    find(api.DeviceGetAttribute, "cuDeviceGetAttribute");
    find(api.DeviceTotalMem, "cuDeviceTotalMem_v2");
    find(api.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(api.DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
    find(api.CtxGetCurrent, "cuCtxGetCurrent");
    find(api.CtxPushCurrent, "cuCtxPushCurrent_v2");
    find(api.CtxPopCurrent, "cuCtxPopCurrent_v2");
    find(api.ModuleLoadData, "cuModuleLoadData");
    find(api.ModuleUnload, "cuModuleUnload");
    find(api.ModuleGetFunction, "cuModuleGetFunction");
    find(api.FuncSetAttribute, "cuFuncSetAttribute");
    find(api.LaunchKernel, "cuLaunchKernel");
    find(api.LaunchKernelEx, "cuLaunchKernelEx", false);
    find(api.MemAlloc, "cuMemAlloc_v2");
    find(api.MemFree, "cuMemFree_v2");
    find(api.PointerGetAttribute, "cuPointerGetAttribute");
    find(api.MemcpyDtoH, "cuMemcpyDtoH_v2");
    find(api.MemcpyHtoD, "cuMemcpyHtoD_v2");
    find(api.MemsetD32, "cuMemsetD32_v2");
    find(api.MemsetD32Async, "cuMemsetD32Async");
    find(api.StreamSynchronize, "cuStreamSynchronize");
    find(api.StreamIsCapturing, "cuStreamIsCapturing");
    find(api.GetErrorName, "cuGetErrorName");
    find(api.GetErrorString, "cuGetErrorString");
    find(api.TensorMapEncodeTiled, "cuTensorMapEncodeTiled", false);
    find(api.FuncLoad, "cuFuncLoad", false);
    if (!failure.empty()) return;
    if (const CUresult result = api.Init(0)) {
      const char* text = nullptr;
      api.GetErrorString(result, &text);
      failure = std::string("the CUDA driver does not start (cuInit): ") + (text ? text : "?");
      return;
    }
    int version = 0;
    if (api.DriverGetVersion(&version) != 0 || version < 12030) api.LaunchKernelEx = nullptr;
  }
};

const LoadedDriver& loaded() {
  // Never destroyed: a session that is a static object of the program ends after our own.
  static const auto& instance = *new LoadedDriver;
  return instance;
}

}  // namespace

const Driver* try_driver(std::string* why) {
  const LoadedDriver& d = loaded();
  if (!d.failure.empty() && why) *why = d.failure;
  return d.failure.empty() ? &d.api : nullptr;
}

const Driver& driver() {
  std::string why;
  const Driver* api = try_driver(&why);
  if (!api) fail(MP_NO_DRIVER, why, "; install the NVIDIA driver, or use the CPU");
  return *api;
}

void check(CUresult result, const char* what) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().GetErrorName(result, &name);
  driver().GetErrorString(result, &text);
  fail(MP_CUDA, what, " failed: ", name ? name : "CUDA error", " (", result, "), ",
       text ? text : "no description");
}

int device_count() {
  const Driver* api = try_driver(nullptr);
  int count = 0;
  return api && api->DeviceGetCount(&count) == 0 ? count : 0;
}

void query_device(int ordinal, mp_device* out) {
  const Driver& api = driver();
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) {
    fail(MP_NO_DRIVER, "GPU ", ordinal, " does not exist; the driver offers ", count);
  }
  CUdevice device;
  check(api.DeviceGet(&device, ordinal), "cuDeviceGet");
  std::memset(out, 0, sizeof *out);
  check(api.DeviceGetName(out->name, sizeof out->name, device), "cuDeviceGetName");
  const auto attribute = [&](int code) {
    int value = 0;
    check(api.DeviceGetAttribute(&value, code, device), "cuDeviceGetAttribute");
    return value;
  };
  out->sm = attribute(kMajor) * 10 + attribute(kMinor);
  out->sm_count = attribute(kSmCount);
  out->shared_per_sm = attribute(kMaxSharedPerSm);
  out->shared_per_block = attribute(kMaxSharedPerBlock);
  out->registers_per_sm = attribute(kMaxRegistersPerSm);
  out->threads_per_sm = attribute(kMaxThreadsPerSm);
  out->blocks_per_sm = attribute(kMaxBlocksPerSm);
  out->clock_mhz = attribute(kClockKhz) / 1000;
  out->memory_clock_mhz = attribute(kMemoryClockKhz) / 1000;
  out->memory_bus_bits = attribute(kMemoryBusBits);
  out->l2_bytes = attribute(kL2Bytes);
  size_t bytes = 0;
  check(api.DeviceTotalMem(&bytes, device), "cuDeviceTotalMem");
  out->memory_bytes = static_cast<int64_t>(bytes);
}

PrimaryContext::PrimaryContext(int ordinal) {
  const Driver& api = driver();
  check(api.DeviceGet(&device_, ordinal), "cuDeviceGet");
  check(api.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

PrimaryContext::~PrimaryContext() {
  if (context_) driver().DevicePrimaryCtxRelease(device_);
}

CurrentContext::CurrentContext(CUcontext context) {
  CUcontext current = nullptr;
  check(driver().CtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == context) return;
  check(driver().CtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext popped;
  if (pushed_) driver().CtxPopCurrent(&popped);
}

bool is_device_memory(const void* address) {
  constexpr int kMemoryType = 2, kDevice = 2;
  unsigned type = 0;
  return driver().PointerGetAttribute(&type, kMemoryType, reinterpret_cast<CUdeviceptr>(address)) ==
             0 &&
         type == kDevice;
}

}  // namespace moonpoly
