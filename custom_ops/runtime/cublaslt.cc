#include "cublaslt.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "error.h"

namespace moonpoly {
namespace {

// CUDA 13's and 12's names, then what a system's linker cache offers under the plain one.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

struct Search {
  CublasLt api{};
  std::string failure;

  Search() {
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

std::atomic<const CublasLt*> found{nullptr};

}  // namespace

const CublasLt* try_cublaslt(std::string* why) {
  static std::mutex mutex;
  if (const CublasLt* api = found.load(std::memory_order_acquire)) return api;
  std::lock_guard<std::mutex> lock(mutex);
  if (const CublasLt* api = found.load(std::memory_order_relaxed)) return api;
  // What was missing may have been loaded since: a provider of ONNX Runtime brings its own.
  auto search = std::make_unique<Search>();
  if (!search->failure.empty()) {
    if (why) *why = search->failure;
    return nullptr;
  }
  // Never destroyed: a session that is a static object of the program ends after our own.
  const CublasLt* api = &search.release()->api;
  found.store(api, std::memory_order_release);
  return api;
}

void check_cublaslt(CublasStatus status, const char* what) {
  if (status == 0) return;
  const CublasLt* api = found.load(std::memory_order_acquire);
  fail(MP_CUDA, what,
       " failed: ", api && api->GetStatusName ? api->GetStatusName(status) : "cuBLASLt status",
       " (", status, ")");
}

}  // namespace moonpoly
