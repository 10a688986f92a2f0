// A stand-in for libcuda.so.1 on machines without a GPU: device memory is host memory, launches are
// recorded. A "cubin" here is the list of its kernel's argument sizes, so that a launch copies
// exactly what the real driver would. Time is what the tests say that launches take.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1;
std::mutex mutex;
int context_marker[2];
thread_local std::vector<void*> contexts;
int capturing = 0;
int modules = 0, functions_loaded = 0, encoded = 0, fail_encode = 0, fail_function = 0;
int on_host = 0, fail_alloc = 0;
std::map<void*, int> shared_limits;

struct Launch {
  uint32_t grid, block, shared;
  uint64_t stream;
  std::vector<std::string> arguments;
  const void* function = nullptr;
  bool early = false;  // may run before the kernel in front of it has ended
};
std::vector<Launch> launches;

struct Memset {
  uint64_t pointer, count, stream;
};
std::vector<Memset> memsets;

struct PendingMemset {  // of the null stream
  uint32_t* words;
  size_t count;
  uint32_t value;
};
std::vector<PendingMemset> pending;

// What a test makes of a launch, by its number: does its work if `execute`, returns how long it
// takes in microseconds.
using Worker = double (*)(int launch, int execute);
Worker worker = nullptr;
double clock_us = 0;
int l2_bytes = 60 << 20;
int hanging = 0;  // the stream never becomes idle

struct Graph {
  double us = 0;
};
Graph* captured = nullptr;  // of the stream that is being captured
int graphs = 0, streams = 0, events = 0;
int64_t allocations = 0;

bool is_empty_kernel(const void* image) { return std::memcmp(image, ".version", 8) == 0; }

}  // namespace

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
EXPORT int cuDeviceGetCount(int* n) { return *n = 2, 0; }
EXPORT int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
EXPORT int cuDeviceGetName(char* name, int bytes, int device) {
  std::strncpy(name, device ? "Fake GPU 1" : "NVIDIA H200", bytes);
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 13:
      *value = 1980000;
      break;
    case 16:
      *value = 132;
      break;
    case 36:
      *value = 3201000;
      break;
    case 37:
      *value = 6144;
      break;
    case 38:
      *value = l2_bytes;
      break;
    case 39:
      *value = 2048;
      break;
    case 75:
      *value = 9;
      break;
    case 76:
      *value = 0;
      break;
    case 81:
      *value = 233472;
      break;
    case 82:
      *value = 65536;
      break;
    case 97:
      *value = 232448;
      break;
    case 106:
      *value = 32;
      break;
    default:
      return kInvalidValue;
  }
  return 0;
}
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{141} << 30, 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = &context_marker[device], 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT int cuCtxGetCurrent(void** context) {
  return *context = contexts.empty() ? nullptr : contexts.back(), 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), 0; }
EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return 201;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  std::lock_guard<std::mutex> lock(mutex);
  if (contexts.empty()) return 201;
  if (std::memcmp(image, "FAKE", 4) != 0 && !is_empty_kernel(image)) return 200;
  ++modules;
  return *module = const_cast<void*>(image), 0;
}
EXPORT int cuModuleUnload(void*) {
  std::lock_guard<std::mutex> lock(mutex);
  return --modules, 0;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = module,
         std::strcmp(name, is_empty_kernel(module) ? "empty" : "kernel") ? 500 : 0;
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  std::lock_guard<std::mutex> lock(mutex);
  if (attribute != 8 || value > 232448) return kInvalidValue;
  return shared_limits[function] = value, 0;
}
EXPORT int cuFuncLoad(void*) {
  std::lock_guard<std::mutex> lock(mutex);
  if (fail_function) return 2;
  return ++functions_loaded, 0;
}

namespace {

int record_launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void* stream, void** params, void** extra) {
  std::lock_guard<std::mutex> lock(mutex);
  if (contexts.empty()) return 201;
  if (!function || extra || gx == 0 || gy != 1 || gz != 1 || by != 1 || bz != 1 || bx > 1024 ||
      static_cast<int>(shared) > shared_limits[function]) {
    return kInvalidValue;
  }
  const auto* image = static_cast<const char*>(function);
  int32_t count = 0;
  if (!is_empty_kernel(function)) std::memcpy(&count, image + 4, 4);
  Launch launch{gx, bx, shared, reinterpret_cast<uint64_t>(stream), {}, function};
  for (int i = 0; i < count; ++i) {
    int32_t bytes;
    std::memcpy(&bytes, image + 8 + 4 * i, 4);
    launch.arguments.emplace_back(static_cast<const char*>(params[i]), bytes);
  }
  launches.push_back(std::move(launch));
  return 0;
}

// Time passes, or is added to the graph that is captured.
void run_last_launch() {
  const double us = worker ? worker(static_cast<int>(launches.size()) - 1, !captured) : 1;
  (captured ? captured->us : clock_us) += us;
}

}  // namespace

EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned shared, void* stream, void** params,
                          void** extra) {
  const int result = record_launch(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
  if (result == 0) run_last_launch();
  return result;
}
struct LaunchConfig {  // as cuda.h lays CUlaunchConfig and its attributes out
  unsigned grid[3], block[3], shared;
  void* stream;
  const struct {
    int id;
    char padding[4];
    int value[16];
  }* attributes;
  unsigned attribute_count;
};
EXPORT int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** params, void** extra) {
  if (c->attribute_count != 1 || c->attributes->id != 6) return kInvalidValue;
  const int result = record_launch(function, c->grid[0], c->grid[1], c->grid[2], c->block[0],
                                   c->block[1], c->block[2], c->shared, c->stream, params, extra);
  if (result != 0) return result;
  launches.back().early = c->attributes->value[0] != 0;
  run_last_launch();
  return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  if (contexts.empty()) return 201;
  if (fail_alloc) return 2;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xcd, bytes);
  ++allocations;
  return *pointer = reinterpret_cast<uint64_t>(memory), 0;
}
EXPORT int cuMemFree_v2(uint64_t pointer) {
  --allocations;
  return std::free(reinterpret_cast<void*>(pointer)), 0;
}
EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  return *free = size_t{64} << 20, *total = size_t{141} << 30, 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(target), source, bytes), 0;
}
EXPORT int cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t bytes) {
  if (contexts.empty()) return 201;
  return std::memcpy(reinterpret_cast<void*>(target), source, bytes), 0;
}
EXPORT int cuMemcpyDtoH_v2(void* target, uint64_t source, size_t bytes) {
  return std::memcpy(target, reinterpret_cast<void*>(source), bytes), 0;
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, void*) {
  clock_us += bytes * 2e-6 / 4;  // 4 TB/s, read and written
  return std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes), 0;
}
EXPORT int cuPointerGetAttribute(unsigned* value, int attribute, uint64_t pointer) {
  if (attribute != 2 || pointer == 0 || on_host) return kInvalidValue;
  return *value = 2, 0;
}
// Asynchronous to the host, like the driver's, and here as late as it may be.
EXPORT int cuMemsetD32_v2(uint64_t pointer, unsigned value, size_t count) {
  std::lock_guard<std::mutex> lock(mutex);
  return pending.push_back({reinterpret_cast<uint32_t*>(pointer), count, value}), 0;
}
EXPORT int cuStreamSynchronize(void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream) return kInvalidValue;
  for (const PendingMemset& m : pending) std::fill_n(m.words, m.count, m.value);
  return pending.clear(), 0;
}
EXPORT int cuMemsetD32Async(uint64_t pointer, unsigned value, size_t count, void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (pointer % 4) return kInvalidValue;
  memsets.push_back({pointer, count, reinterpret_cast<uint64_t>(stream)});
  return std::fill_n(reinterpret_cast<uint32_t*>(pointer), count, value), 0;
}
EXPORT int cuStreamIsCapturing(void*, int* status) {
  return *status = capturing || captured != nullptr, 0;
}
EXPORT int cuStreamCreate(void** stream, unsigned flags) {
  if (contexts.empty()) return 201;
  if (flags > 1) return kInvalidValue;
  return *stream = new char, ++streams, 0;
}
EXPORT int cuStreamDestroy_v2(void* stream) {
  return delete static_cast<char*>(stream), --streams, 0;
}
EXPORT int cuStreamQuery(void*) { return hanging ? 600 : 0; }
EXPORT int cuEventCreate(void** event, unsigned) { return *event = new double(-1), ++events, 0; }
EXPORT int cuEventDestroy_v2(void* event) {
  return delete static_cast<double*>(event), --events, 0;
}
EXPORT int cuEventRecord(void* event, void*) {
  return *static_cast<double*>(event) = clock_us, captured ? 900 : 0;
}
EXPORT int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  const double from = *static_cast<double*>(start), to = *static_cast<double*>(end);
  if (from < 0 || to < 0) return 400;
  return *milliseconds = static_cast<float>((to - from) * 1e-3), 0;
}
EXPORT int cuStreamBeginCapture_v2(void* stream, int) {
  if (!stream || captured) return kInvalidValue;
  return captured = new Graph, 0;
}
EXPORT int cuStreamEndCapture(void*, void** graph) {
  if (!captured) return 901;
  *graph = captured, captured = nullptr;
  return ++graphs, 0;
}
EXPORT int cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t flags) {
  if (flags) return kInvalidValue;
  return *executable = new Graph(*static_cast<Graph*>(graph)), ++graphs, 0;
}
EXPORT int cuGraphLaunch(void* executable, void*) {
  if (captured) return 900;
  return clock_us += static_cast<Graph*>(executable)->us, 0;
}
EXPORT int cuGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), --graphs, 0; }
EXPORT int cuGraphExecDestroy(void* graph) {
  return delete static_cast<Graph*>(graph), --graphs, 0;
}
EXPORT int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  return std::snprintf(text, bytes, "0000:%02d:00.0", device + 1), 0;
}
EXPORT int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
EXPORT int cuGetErrorString(int, const char** text) { return *text = "a fake failure", 0; }

// Checks what the driver's documentation demands, then stores the arguments in the map.
EXPORT int cuTensorMapEncodeTiled(char* map, int dtype, uint32_t rank, void* address,
                                  const uint64_t* dims, const uint64_t* strides,
                                  const uint32_t* box, const uint32_t* steps, int interleave,
                                  int swizzle, int promotion, int fill) {
  const uint64_t element = dtype == 7 || dtype == 11 ? 4 : 2;
  if (fail_encode) return 999;
  ++encoded;
  if (reinterpret_cast<uint64_t>(map) % 64 || reinterpret_cast<uint64_t>(address) % 16) return 1;
  if (rank != 3 || interleave || promotion != 2 || fill) return 1;
  for (int i = 0; i < 3; ++i) {
    if (dims[i] == 0 || dims[i] > (uint64_t{1} << 32) || box[i] == 0 || box[i] > 256) return 1;
    if (steps[i] != 1) return 1;
  }
  if (strides[0] < dims[0] * element || strides[1] < dims[1] * strides[0]) return 1;
  for (int i = 0; i < 2; ++i) {
    if (strides[i] % 16 || strides[i] >= (uint64_t{1} << 40)) return 1;
  }
  const uint64_t inner = box[0] * element;
  if (inner % 16 || (swizzle && inner > (uint64_t{16} << swizzle))) return 1;
  std::memset(map, 0, 128);
  std::memcpy(map, &dtype, 4);
  std::memcpy(map + 4, &swizzle, 4);
  std::memcpy(map + 8, &address, 8);
  std::memcpy(map + 16, dims, 24);
  std::memcpy(map + 40, strides, 16);
  std::memcpy(map + 56, box, 12);
  return 0;
}

// ---- for the tests
// ---------------------------------------------------------------------------------
EXPORT void fake_set_capturing(int on) { capturing = on; }
// Time in which another library's work keeps the stream busy.
EXPORT void fake_spend(double us) { (captured ? captured->us : clock_us) += us; }
EXPORT void fake_set_worker(Worker function) { worker = function; }
EXPORT void fake_set_l2_bytes(int bytes) { l2_bytes = bytes; }
EXPORT void fake_hang(int on) { hanging = on; }
// Objects that were made and not destroyed.
EXPORT int fake_live_objects() { return graphs + streams + events; }
EXPORT int64_t fake_live_allocations() { return allocations; }
EXPORT const void* fake_image(int i) { return launches[i].function; }
EXPORT void fake_pointers_on_host(int on) { on_host = on; }
EXPORT void fake_fail_alloc(int on) { fail_alloc = on; }
EXPORT int fake_allocations() { return static_cast<int>(allocations); }
EXPORT void fake_fail_encode(int on) { fail_encode = on; }
EXPORT void fake_fail_function(int on) { fail_function = on; }
EXPORT void fake_set_context(int device) {
  contexts.clear();
  if (device >= 0) contexts.push_back(&context_marker[device]);
}
EXPORT int fake_context_depth() { return static_cast<int>(contexts.size()); }
EXPORT int fake_modules() { return modules; }
EXPORT int fake_encoded() { return encoded; }
EXPORT int fake_functions_loaded() { return functions_loaded; }
EXPORT void fake_reset() { launches.clear(), memsets.clear(); }
EXPORT int fake_launched_early(int i) { return launches[i].early; }
EXPORT int fake_launches() { return static_cast<int>(launches.size()); }
EXPORT void fake_launch(int i, uint64_t out[4]) {
  const Launch& l = launches[i];
  out[0] = l.grid, out[1] = l.block, out[2] = l.shared, out[3] = l.stream;
}
EXPORT const char* fake_argument(int i, int argument, int* bytes) {
  if (argument >= static_cast<int>(launches[i].arguments.size())) return nullptr;
  const std::string& value = launches[i].arguments[argument];
  return *bytes = static_cast<int>(value.size()), value.data();
}
EXPORT int fake_memsets() { return static_cast<int>(memsets.size()); }
EXPORT void fake_memset(int i, uint64_t out[3]) {
  out[0] = memsets[i].pointer, out[1] = memsets[i].count, out[2] = memsets[i].stream;
}
