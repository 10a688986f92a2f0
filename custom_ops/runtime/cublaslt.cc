#include "cublaslt.h"

#include <dlfcn.h>

#include <cstring>

#include "error.h"

namespace moonpoly {
namespace {

// CUDA 13's and 12's names, then what a system's linker cache offers under the plain one.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

struct LoadedCublasLt {
  CublasLt api{};
  std::string failure;

  LoadedCublasLt() {
    void* library = nullptr;
    // A second copy beside one in use would cost 400 MB and load its kernels again.
    for (int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
      for (const char* name : kNames) {
        if (!library) library = dlopen(name, flags);
      }
    }
    if (!library) {
      failure = "libcublasLt was not found (looked for";
      for (const char* name : kNames) failure += std::string(" ") + name;
      failure += ")";
      return;
    }
    const auto find = [&](auto& slot, const char* name, bool needed = true) {
      void* symbol = dlsym(library, name);
      std::memcpy(&slot, &symbol, sizeof symbol);
      if (!symbol && needed && failure.empty()) failure = std::string("libcublasLt has no ") + name;
    };
    find(api.Create, "cublasLtCreate");
    find(api.Destroy, "cublasLtDestroy");
    find(api.MatmulDescCreate, "cublasLtMatmulDescCreate");
    find(api.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    find(api.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    find(api.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    find(api.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    find(api.MatrixLayoutSetAttribute, "cublasLtMatrixLayoutSetAttribute");
    find(api.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    find(api.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    find(api.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    find(api.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(api.Matmul, "cublasLtMatmul");
    find(api.GetStatusName, "cublasLtGetStatusName", false);
  }
};

const LoadedCublasLt& loaded() {
  // Never destroyed: a session that is a static object of the program ends after our own.
  static const auto& instance = *new LoadedCublasLt;
  return instance;
}

}  // namespace

const CublasLt* try_cublaslt(std::string* why) {
  const LoadedCublasLt& found = loaded();
  if (!found.failure.empty() && why) *why = found.failure;
  return found.failure.empty() ? &found.api : nullptr;
}

void check_cublaslt(CublasStatus status, const char* what) {
  if (status == 0) return;
  const auto name = loaded().api.GetStatusName;
  fail(MP_CUDA, what, " failed: ", name ? name(status) : "cuBLASLt status", " (", status, ")");
}

}  // namespace moonpoly
