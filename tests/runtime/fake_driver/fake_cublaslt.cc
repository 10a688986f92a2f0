// A stand-in for libcublasLt.so.13 over host memory: it multiplies column-major matrices as the
// library's documentation says, and records what it was asked for. A heuristic's algorithm holds
// its number, so that a launch tells whose it got.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotInitialized = 1, kInvalidValue = 7, kNotSupported = 15;
constexpr int kF32 = 0, kF16 = 2, kBF16 = 14;

struct Desc {
  int compute, scale;
  int32_t ops[2] = {0, 0};
  uint32_t epilogue = 1;
  const void* bias = nullptr;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t pitch, stride = 0;
  int32_t batch = 1;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reduction = 7;
  uint32_t align[4] = {256, 256, 256, 256};
};
struct Result {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

std::mutex mutex;
int handles = 0, descriptors = 0, layouts = 0, preferences = 0, heuristics = 0, products = 0;
uint64_t wanted_workspace = 0;  // of every algorithm
int refusing = 0, failing = 0;
struct Asked {
  int64_t compute, workspace_limit, reduction, align[4], bias_align, epilogue;
} asked;
struct Launched {
  uint64_t algorithm, workspace, workspace_bytes, stream;
} launched;

// On the stand-in for the driver, at 1 TFLOP/s.
void spend_time(double us) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return;
  reinterpret_cast<void (*)(double)>(dlsym(driver, "fake_spend"))(us);
  dlclose(driver);
}

float half(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float value = exponent == 0    ? std::ldexp(float(mantissa), -24)
                      : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                       : std::ldexp(float(mantissa + 1024), exponent - 25);
  return h >> 15 ? -value : value;
}

double load(int type, const void* base, int64_t i) {
  if (type == kF32) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  if (type == kF16) return half(bits);
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

void store(int type, void* base, int64_t i, double value) {
  if (type == kF32) {
    static_cast<float*>(base)[i] = static_cast<float>(value);
  } else if (type == kF16) {
    _Float16 narrow = static_cast<_Float16>(value);
    std::memcpy(static_cast<uint16_t*>(base) + i, &narrow, 2);
  } else {
    const float wide = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    static_cast<uint16_t*>(base)[i] = static_cast<uint16_t>((bits + 0x8000) >> 16);
  }
}

// Whether sizes agree and pitches hold a column; what the library would refuse too.
bool consistent(const Desc& d, const Layout& a, const Layout& b, const Layout& c, const Layout& y) {
  const uint64_t m = d.ops[0] ? a.columns : a.rows, k = d.ops[0] ? a.rows : a.columns;
  const uint64_t n = d.ops[1] ? b.rows : b.columns, inner = d.ops[1] ? b.columns : b.rows;
  for (const Layout* l : {&a, &b, &c, &y}) {
    if (l->pitch < static_cast<int64_t>(l->rows) || l->batch != y.batch || l->type != y.type ||
        l->rows == 0 || l->columns == 0) {
      return false;
    }
  }
  return k == inner && y.rows == m && y.columns == n && c.rows == m && c.columns == n &&
         d.scale == kF32 && (d.compute == 68 || (d.compute == 77 && y.type == kF32));
}

}  // namespace

EXPORT int cublasLtCreate(void** handle) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failing) return kNotInitialized;
  ++handles;
  return *handle = new int, 0;
}
EXPORT int cublasLtDestroy(void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  --handles;
  return delete static_cast<int*>(handle), 0;
}
EXPORT const char* cublasLtGetStatusName(int) { return "CUBLAS_STATUS_FAKE"; }

EXPORT int cublasLtMatmulDescCreate(Desc** desc, int compute, int scale) {
  std::lock_guard<std::mutex> lock(mutex);
  ++descriptors;
  return *desc = new Desc{compute, scale}, 0;
}
EXPORT int cublasLtMatmulDescDestroy(Desc* desc) {
  std::lock_guard<std::mutex> lock(mutex);
  --descriptors;
  return delete desc, 0;
}
EXPORT int cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value,
                                          size_t bytes) {
  const auto take = [&](auto* slot) {
    if (bytes != sizeof *slot) return kInvalidValue;
    std::memcpy(slot, value, bytes);
    return 0;
  };
  switch (attribute) {
    case 3:
      return take(&desc->ops[0]);
    case 4:
      return take(&desc->ops[1]);
    case 7:
      return take(&desc->epilogue);
    case 8:
      return take(&desc->bias);
    default:
      return kInvalidValue;
  }
}

EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns,
                                      int64_t pitch) {
  std::lock_guard<std::mutex> lock(mutex);
  ++layouts;
  return *layout = new Layout{type, rows, columns, pitch}, 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) {
  std::lock_guard<std::mutex> lock(mutex);
  --layouts;
  return delete layout, 0;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value,
                                            size_t bytes) {
  if (attribute == 5 && bytes == 4) return std::memcpy(&layout->batch, value, 4), 0;
  if (attribute == 6 && bytes == 8) return std::memcpy(&layout->stride, value, 8), 0;
  return kInvalidValue;
}

EXPORT int cublasLtMatmulPreferenceCreate(Preference** preference) {
  std::lock_guard<std::mutex> lock(mutex);
  ++preferences;
  return *preference = new Preference, 0;
}
EXPORT int cublasLtMatmulPreferenceDestroy(Preference* preference) {
  std::lock_guard<std::mutex> lock(mutex);
  --preferences;
  return delete preference, 0;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value,
                                                size_t bytes) {
  if (attribute == 1 && bytes == 8) return std::memcpy(&p->workspace, value, 8), 0;
  if (attribute == 3 && bytes == 4) return std::memcpy(&p->reduction, value, 4), 0;
  if (attribute >= 5 && attribute <= 8 && bytes == 4) {
    return std::memcpy(&p->align[attribute - 5], value, 4), 0;
  }
  return kInvalidValue;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, const Desc* desc, const Layout* a, const Layout* b,
                                          const Layout* c, const Layout* y,
                                          const Preference* preference, int wanted, Result* results,
                                          int* found) {
  std::lock_guard<std::mutex> lock(mutex);
  ++heuristics;
  *found = 0;
  asked.compute = desc->compute;
  asked.workspace_limit = static_cast<int64_t>(preference->workspace);
  asked.reduction = preference->reduction;
  for (int i = 0; i < 4; ++i) asked.align[i] = preference->align[i];
  asked.epilogue = desc->epilogue;
  const auto bias = reinterpret_cast<uint64_t>(desc->bias);
  asked.bias_align = static_cast<int64_t>(bias & -bias);
  if (!consistent(*desc, *a, *b, *c, *y) || wanted != 1) return kInvalidValue;
  if (refusing) return kNotSupported;
  *results = Result{};
  results->algorithm[0] = heuristics;
  results->workspace = std::min(wanted_workspace, preference->workspace);
  *found = 1;
  return 0;
}

EXPORT int cublasLtMatmul(void*, const Desc* desc, const float* alpha, const void* a,
                          const Layout* la, const void* b, const Layout* lb, const float* beta,
                          const void* c, const Layout* lc, void* y, const Layout* ly,
                          const uint64_t* algorithm, void* workspace, size_t workspace_bytes,
                          void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!consistent(*desc, *la, *lb, *lc, *ly)) return kInvalidValue;
  if (workspace_bytes && (!workspace || reinterpret_cast<uint64_t>(workspace) % 256)) {
    return kInvalidValue;
  }
  ++products;
  spend_time(4 + 2.0 * ly->rows * ly->columns * (desc->ops[0] ? la->rows : la->columns) *
                     ly->batch * 1e-6);
  launched = {algorithm[0], reinterpret_cast<uint64_t>(workspace), workspace_bytes,
              reinterpret_cast<uint64_t>(stream)};
  std::memset(workspace, 0xee, workspace_bytes);
  const int type = ly->type;
  const int64_t inner = desc->ops[0] ? la->rows : la->columns;
  for (int32_t z = 0; z < ly->batch; ++z) {
    for (uint64_t j = 0; j < ly->columns; ++j) {
      for (uint64_t i = 0; i < ly->rows; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < inner; ++k) {
          const int64_t left = desc->ops[0] ? k + i * la->pitch : i + k * la->pitch;
          const int64_t right = desc->ops[1] ? j + k * lb->pitch : k + j * lb->pitch;
          sum += load(type, a, left + z * la->stride) * load(type, b, right + z * lb->stride);
        }
        double value = *alpha * sum;
        if (*beta != 0) value += *beta * load(type, c, i + j * lc->pitch + z * lc->stride);
        if (desc->epilogue == 4) value += load(type, desc->bias, i);
        store(type, y, i + j * ly->pitch + z * ly->stride, value);
      }
    }
  }
  return 0;
}

// ---- for the tests ----
EXPORT void fakelt_set(uint64_t workspace, int refuse, int fail) {
  std::lock_guard<std::mutex> lock(mutex);
  wanted_workspace = workspace, refusing = refuse, failing = fail;
}
EXPORT void fakelt_live(int out[4]) {
  std::lock_guard<std::mutex> lock(mutex);
  out[0] = handles, out[1] = descriptors, out[2] = layouts, out[3] = preferences;
}
EXPORT int fakelt_heuristics() { return heuristics; }
EXPORT int fakelt_products() { return products; }
EXPORT void fakelt_asked(Asked* out) { *out = asked; }
EXPORT void fakelt_launched(Launched* out) { *out = launched; }
