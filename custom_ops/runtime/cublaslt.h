// cuBLASLt, found at run time, so that one binary loads where it is absent. The few types and codes
// are declared here because the build needs no CUDA headers; they are part of the library's stable
// binary interface (cublasLt.h of CUDA 12 and 13).
#ifndef MOONPOLY_CUBLASLT_H_
#define MOONPOLY_CUBLASLT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver.h"

namespace moonpoly {

using CublasStatus = int;
using CublasLtHandle = struct CublasLtContext*;
using CublasLtMatmulDesc = struct CublasLtMatmulDescOpaque*;
using CublasLtLayout = struct CublasLtMatrixLayoutOpaque*;
using CublasLtPreference = struct CublasLtPreferenceOpaque*;

enum : int { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum : int { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum : int32_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum : int {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
};
enum : int {
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum : int {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,  // B, C and D follow
};
enum : uint32_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum : uint32_t { CUBLASLT_EPILOGUE_BIAS = 4 };

struct CublasLtAlgorithm {
  uint64_t opaque[8];
};
struct CublasLtHeuristic {
  CublasLtAlgorithm algorithm;
  size_t workspace_bytes;
  CublasStatus status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(CublasLtHeuristic) == 96, "as cublasLtMatmulHeuristicResult_t");

struct CublasLt {
  CublasStatus (*Create)(CublasLtHandle* handle);
  CublasStatus (*Destroy)(CublasLtHandle handle);
  CublasStatus (*MatmulDescCreate)(CublasLtMatmulDesc* desc, int compute_type, int scale_type);
  CublasStatus (*MatmulDescDestroy)(CublasLtMatmulDesc desc);
  CublasStatus (*MatmulDescSetAttribute)(CublasLtMatmulDesc desc, int attribute, const void* value,
                                         size_t bytes);
  CublasStatus (*MatrixLayoutCreate)(CublasLtLayout* layout, int type, uint64_t rows,
                                     uint64_t columns, int64_t pitch);
  CublasStatus (*MatrixLayoutDestroy)(CublasLtLayout layout);
  CublasStatus (*MatrixLayoutSetAttribute)(CublasLtLayout layout, int attribute, const void* value,
                                           size_t bytes);
  CublasStatus (*MatmulPreferenceCreate)(CublasLtPreference* preference);
  CublasStatus (*MatmulPreferenceDestroy)(CublasLtPreference preference);
  CublasStatus (*MatmulPreferenceSetAttribute)(CublasLtPreference preference, int attribute,
                                               const void* value, size_t bytes);
  CublasStatus (*MatmulAlgoGetHeuristic)(CublasLtHandle handle, CublasLtMatmulDesc desc,
                                         CublasLtLayout a, CublasLtLayout b, CublasLtLayout c,
                                         CublasLtLayout d, CublasLtPreference preference,
                                         int wanted, CublasLtHeuristic* results, int* found);
  CublasStatus (*Matmul)(CublasLtHandle handle, CublasLtMatmulDesc desc, const void* alpha,
                         const void* a, CublasLtLayout a_layout, const void* b,
                         CublasLtLayout b_layout, const void* beta, const void* c,
                         CublasLtLayout c_layout, void* d, CublasLtLayout d_layout,
                         const CublasLtAlgorithm* algorithm, void* workspace,
                         size_t workspace_bytes, CUstream stream);
  // Absent before CUDA 11.4; only names failures.
  const char* (*GetStatusName)(CublasStatus status);
};

// The library that the process has loaded already (ONNX Runtime's CUDA provider and torch load
// theirs), else the newest that is found. Null where there is none, with the reason in `why`: the
// next call looks again.
const CublasLt* try_cublaslt(std::string* why);

// Throws Error(MP_CUDA) naming the call and the status.
void check_cublaslt(CublasStatus status, const char* what);

}  // namespace moonpoly
#endif  // MOONPOLY_CUBLASLT_H_
