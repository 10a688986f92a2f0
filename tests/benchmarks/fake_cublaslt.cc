// A cuBLASLt that multiplies column-major matrices of floats on the CPU: what the binding hands
// over has to mean the right product. Knows fp32 alone; algorithms are numbered and all the same.
#include <cstdint>
#include <cstring>

namespace {
struct Layout {
  int64_t rows, columns, ld, stride;
  int32_t type, batch;
};
struct Operation {
  int32_t compute, scale, first_op;  // first_op 1: the first factor is stored transposed
};
struct Preference {
  uint64_t workspace;
  uint32_t reduction, alignment;
};
struct Result {
  uint64_t algorithm[8];
  size_t workspace;
  int32_t status;
  float waves;
  int32_t reserved[4];
};
constexpr int kInvalid = 7, kNotSupported = 15;
constexpr int32_t kProposed = 3, kFails = 2;  // the last of them does not run
constexpr int64_t kRefusedColumns = 13;       // the heuristic knows nothing for this many
int handles = 0, descriptors = 0;
}  // namespace

extern "C" {
int fake_open_descriptors() { return descriptors; }
int fake_open_handles() { return handles; }
size_t cublasLtGetVersion() { return 130100; }
int cublasLtCreate(void** handle) {
  *handle = &handles;
  ++handles;
  return 0;
}
int cublasLtDestroy(void* handle) {
  --handles;
  return handle == &handles ? 0 : kInvalid;
}
int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
  ++descriptors;
  *out = new Operation{compute, scale, 0};
  return compute == 68 || compute == 77 ? 0 : kInvalid;
}
int cublasLtMatmulDescDestroy(void* operation) {
  --descriptors;
  delete static_cast<Operation*>(operation);
  return 0;
}
int cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value,
                                   size_t bytes) {
  if (attribute != 3 || bytes != 4) return kInvalid;
  memcpy(&static_cast<Operation*>(operation)->first_op, value, 4);
  return 0;
}
int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  ++descriptors;
  *out = new Layout{static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld, 0, type, 1};
  return ld >= static_cast<int64_t>(rows) ? 0 : kInvalid;
}
int cublasLtMatrixLayoutDestroy(void* layout) {
  --descriptors;
  delete static_cast<Layout*>(layout);
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t bytes) {
  auto* l = static_cast<Layout*>(layout);
  if (attribute == 5 && bytes == 4) {
    memcpy(&l->batch, value, 4);
  } else if (attribute == 6 && bytes == 8) {
    memcpy(&l->stride, value, 8);
  } else {
    return kInvalid;
  }
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** out) {
  ++descriptors;
  *out = new Preference{0, 7, 256};
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void* preference) {
  --descriptors;
  delete static_cast<Preference*>(preference);
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                         size_t bytes) {
  auto* p = static_cast<Preference*>(preference);
  if (attribute == 1 && bytes == 8) {
    memcpy(&p->workspace, value, 8);
  } else if (attribute == 3 && bytes == 4) {
    memcpy(&p->reduction, value, 4);
  } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
    memcpy(&p->alignment, value, 4);
  } else {
    return kInvalid;
  }
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, void*, void* a, void*, void* c, void* d,
                                   void* preference, int wanted, Result* results, int* count) {
  if (handle != &handles || c != d || !static_cast<Preference*>(preference)->workspace)
    return kInvalid;
  const bool halves = static_cast<Layout*>(a)->type != 0;
  if (static_cast<Preference*>(preference)->reduction != (halves ? 2 : 7)) return kInvalid;
  *count = 0;
  if (static_cast<Layout*>(a)->columns == kRefusedColumns) return kNotSupported;
  for (int i = 0; i < kProposed && i < wanted; ++i) {
    results[i] = Result{};
    results[i].algorithm[0] = i;
    results[i].algorithm[1] = static_cast<Preference*>(preference)->alignment;
    ++*count;
  }
  return 0;
}
// Tile and split; it knows no other setting.
int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t* algorithm, int attribute, void* value,
                                         size_t bytes, size_t* written) {
  if ((attribute != 1 && attribute != 2) || bytes != 4) return kInvalid;
  const auto code = static_cast<uint32_t>(attribute == 1 ? 20 + algorithm[0] : algorithm[1]);
  memcpy(value, &code, 4);
  *written = 4;
  return 0;
}
int cublasLtMatmul(void* handle, void* operation, const float* alpha, const float* a,
                   void* a_layout, const float* b, void* b_layout, const float* beta,
                   const float* c, void* c_layout, float* d, void* d_layout,
                   const uint64_t* algorithm, void* workspace, size_t workspace_bytes, void*) {
  const auto &la = *static_cast<Layout*>(a_layout), &lb = *static_cast<Layout*>(b_layout),
             &ld = *static_cast<Layout*>(d_layout);
  const bool transposed = static_cast<Operation*>(operation)->first_op == 1;
  const int64_t rows = transposed ? la.columns : la.rows, k_size = lb.rows;
  if (handle != &handles || c != d || c_layout != d_layout || !workspace || !workspace_bytes ||
      la.type || (transposed ? la.rows : la.columns) != k_size || ld.rows != rows ||
      ld.columns != lb.columns || la.batch != ld.batch || lb.batch != ld.batch || *beta != 0) {
    return kInvalid;
  }
  if (algorithm[0] == kFails) return kNotSupported;
  for (int z = 0; z < ld.batch; ++z) {
    for (int64_t j = 0; j < ld.columns; ++j) {
      for (int64_t i = 0; i < ld.rows; ++i) {
        float sum = 0;
        for (int64_t k = 0; k < k_size; ++k) {
          sum += a[z * la.stride + (transposed ? i * la.ld + k : k * la.ld + i)] *
                 b[z * lb.stride + j * lb.ld + k];
        }
        d[z * ld.stride + j * ld.ld + i] = *alpha * sum;
      }
    }
  }
  return 0;
}
}
