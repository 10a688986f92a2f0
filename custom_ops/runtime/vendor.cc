#include "vendor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"
#include "hash.h"
#include "pack.h"
#include "stats.h"

namespace moonpoly {
namespace {

// Shapes whose algorithms are remembered on a device, about 1.5 KB each; then all are forgotten.
constexpr size_t kMaxKnown = 4096;
constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1024;
constexpr int kMaxAlignment = 16;  // bytes; no algorithm asks for more of an operand

// The stride between the entries that batch entries z take by (z / div) % mod, where it is the same
// throughout: each its own, or one for all.
bool strided(int64_t batch, int32_t div, int32_t mod, int64_t entry_stride, int64_t* stride) {
  if (batch == 1 || mod == 1 || div >= batch) {
    *stride = 0;
    return true;
  }
  *stride = entry_stride;
  return div == 1 && mod >= batch;
}

int alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | kMaxAlignment;
  return static_cast<int>(bits & -bits);
}

int cuda_type(int32_t dtype) {
  return dtype == MP_F16 ? CUDA_R_16F : dtype == MP_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

const CublasLt& cublaslt() {
  std::string why;
  const CublasLt* api = try_cublaslt(&why);
  if (!api) {
    fail(MP_NO_DRIVER, why,
         "; install CUDA's cuBLAS (with pip: call onnxruntime.preload_dlls() before the first "
         "session), or plan without it");
  }
  return *api;
}

}  // namespace

const char* vendor_refusal(const mp_problem& p) {
  int64_t stride;
  if (p.k == 0) return "K is 0";
  if (p.activation || p.residual) return "it has an activation or a residual";
  if (p.gated || p.wide) return "its result is gated, or of another type";
  if (std::max(p.m, p.n) >= kMaxExtent) return "M or N is 2^31 or about that";
  // It then skips the product, and with it what is NaN or Inf there.
  if (p.alpha == 0) return "alpha is 0";
  if (!strided(p.batch, p.a_div, p.a_mod, p.a_batch_stride, &stride) ||
      !strided(p.batch, p.b_div, p.b_mod, p.b_batch_stride, &stride)) {
    return "its batch entries have no common stride";
  }
  if (p.bias == MP_BIAS_VECTOR) {
    if (p.bias_stride_m != 0 || p.bias_stride_n != 1) return "its bias is no row of N elements";
    if (p.beta != 1) return "it adds a row bias unscaled, and beta is not 1";
  }
  if (p.bias == MP_BIAS_MATRIX && (p.bias_stride_n != 1 || p.bias_stride_m < p.n)) {
    return "the rows of C are not contiguous";
  }
  return nullptr;
}

bool uses_vendor(const mp_plan& plan) {
  return std::any_of(plan.regions, plan.regions + plan.region_count,
                     [](const mp_region& r) { return r.kernel == MP_VENDOR; });
}

// A product as cuBLASLt sees it. It counts in columns, so that our row-major matrices are its
// transposed ones: Y^T (N x M) = op(B)^T op(A)^T. Its first factor is our B.
struct Vendor::Product {
  int64_t dtype, precision;
  int64_t first_op, second_op;
  int64_t rows, columns, k, batch;  // rows = N, columns = M
  int64_t first_pitch, second_pitch, pitch, bias_pitch;
  int64_t first_stride, second_stride, stride;
  int64_t bias;  // mp_bias
  int64_t first_align, second_align, align, bias_align;
  int64_t workspace_bytes;  // at most

  Product(const mp_problem& p, const mp_region& r, const Operands& o, int64_t workspace) {
    // The pitch of a single row is never used, but must hold it.
    const auto at_least = [](int64_t pitch, int64_t columns) { return std::max(pitch, columns); };
    dtype = p.dtype;
    precision = p.dtype == MP_F32 ? p.precision : MP_TF32;
    first_op = p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    second_op = p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    rows = r.n, columns = r.m, k = p.k, batch = r.z;
    first_pitch = at_least(p.ldb, p.trans_b ? p.k : r.n);
    second_pitch = at_least(p.lda, p.trans_a ? r.m : p.k);
    pitch = at_least(p.ldc, r.n);
    bias_pitch = p.bias == MP_BIAS_MATRIX ? p.bias_stride_m : 0;
    strided(p.batch, p.b_div, p.b_mod, p.b_batch_stride, &first_stride);
    strided(p.batch, p.a_div, p.a_mod, p.a_batch_stride, &second_stride);
    stride = p.batch > 1 ? p.c_batch_stride : 0;
    bias = p.bias;
    first_align = alignment_of(o.b), second_align = alignment_of(o.a), align = alignment_of(o.y);
    bias_align = p.bias ? alignment_of(o.bias) : kMaxAlignment;
    workspace_bytes = std::max<int64_t>(0, workspace - kVendorAlignment);
  }
  bool operator==(const Product& other) const {
    return std::memcmp(this, &other, sizeof other) == 0;
  }
};

size_t Vendor::Hash::operator()(const Product& product) const { return hash_of(product); }

namespace {

// Operands of a region, moved to its first row, column and batch entry.
Operands moved(const mp_problem& p, const mp_region& r, const Operands& o) {
  const auto by = [&](const void* base, int64_t elements) {
    return base ? static_cast<const char*>(base) + elements * element_bytes(p.dtype) : nullptr;
  };
  return {by(o.a, (p.trans_a ? r.m0 : r.m0 * p.lda) + r.z0 / p.a_div % p.a_mod * p.a_batch_stride),
          by(o.b, (p.trans_b ? r.n0 * p.ldb : r.n0) + r.z0 / p.b_div % p.b_mod * p.b_batch_stride),
          by(o.bias, r.m0 * p.bias_stride_m + r.n0 * p.bias_stride_n),
          const_cast<char*>(by(o.y, r.m0 * p.ldc + r.n0 + r.z0 * p.c_batch_stride))};
}

}  // namespace

// The descriptors of a product and cuBLASLt's algorithm for it.
class Vendor::Algorithm {
 public:
  Algorithm(const CublasLt& api, CublasLtHandle handle, const Product& p) : api_(api) {
    const int compute = p.dtype == MP_F32 && p.precision == MP_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                    : CUBLAS_COMPUTE_32F;
    check_cublaslt(api_.MatmulDescCreate(&desc_, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
    try {
      describe(p);
      choose(handle, p);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Algorithm() { release(); }
  Algorithm(const Algorithm&) = delete;
  Algorithm& operator=(const Algorithm&) = delete;

  bool exists() const { return exists_; }
  CublasStatus status() const { return status_; }  // of the search
  int64_t workspace_bytes() const { return workspace_bytes_; }

  void launch(CublasLtHandle handle, const mp_problem& p, const Operands& o, void* workspace,
              CUstream stream) {
    const bool matrix = p.bias == MP_BIAS_MATRIX;
    const float beta = matrix ? p.beta : 0.0f;
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (p.bias == MP_BIAS_VECTOR) {
      // The address is part of the description, which threads share.
      lock.lock();
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
    }
    check_cublaslt(api_.Matmul(handle, desc_, &p.alpha, o.b, layouts_[0], o.a, layouts_[1], &beta,
                               matrix ? o.bias : o.y, layouts_[2], o.y, layouts_[3], &algorithm_,
                               workspace_bytes_ ? workspace : nullptr,
                               static_cast<size_t>(workspace_bytes_), stream),
                   "cublasLtMatmul");
  }

 private:
  template <typename Value>
  void set(int attribute, const Value& value) {
    check_cublaslt(api_.MatmulDescSetAttribute(desc_, attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
  }

  void lay_out(int index, const Product& p, int64_t rows, int64_t columns, int64_t pitch,
               int64_t stride) {
    CublasLtLayout& layout = layouts_[index];
    check_cublaslt(api_.MatrixLayoutCreate(&layout, cuda_type(static_cast<int32_t>(p.dtype)), rows,
                                           columns, pitch),
                   "cublasLtMatrixLayoutCreate");
    if (p.batch == 1) return;
    const auto count = static_cast<int32_t>(p.batch);
    check_cublaslt(api_.MatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                 sizeof count),
                   "cublasLtMatrixLayoutSetAttribute of the batch count");
    check_cublaslt(api_.MatrixLayoutSetAttribute(
                       layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
                   "cublasLtMatrixLayoutSetAttribute of the batch stride");
  }

  void describe(const Product& p) {
    set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(p.first_op));
    set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(p.second_op));
    if (p.bias == MP_BIAS_VECTOR) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS});
      // The heuristic reads off the address how well a bias is aligned.
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, reinterpret_cast<const void*>(p.bias_align));
    }
    const bool first = p.first_op == CUBLAS_OP_T, second = p.second_op == CUBLAS_OP_T;
    const bool matrix = p.bias == MP_BIAS_MATRIX;
    lay_out(0, p, first ? p.k : p.rows, first ? p.rows : p.k, p.first_pitch, p.first_stride);
    lay_out(1, p, second ? p.columns : p.k, second ? p.k : p.columns, p.second_pitch,
            p.second_stride);
    lay_out(2, p, p.rows, p.columns, matrix ? p.bias_pitch : p.pitch, matrix ? 0 : p.stride);
    lay_out(3, p, p.rows, p.columns, p.pitch, p.stride);
  }

  void choose(CublasLtHandle handle, const Product& p) {
    CublasLtPreference preference = nullptr;
    check_cublaslt(api_.MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](int attribute, auto value) {
      const CublasStatus status =
          api_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
      if (status) api_.MatmulPreferenceDestroy(preference);
      check_cublaslt(status, "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(p.workspace_bytes));
    // Slices of K are summed in fp32 and in a fixed order: the other schemes round them to the
    // output's type.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    const int64_t c_align = p.bias == MP_BIAS_MATRIX ? p.bias_align : p.align;
    int attribute = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    for (int64_t bytes : {p.first_align, p.second_align, c_align, p.align}) {
      prefer(attribute++, static_cast<uint32_t>(bytes));
    }
    CublasLtHeuristic best{};
    int found = 0;
    status_ = api_.MatmulAlgoGetHeuristic(handle, desc_, layouts_[0], layouts_[1], layouts_[2],
                                          layouts_[3], preference, 1, &best, &found);
    api_.MatmulPreferenceDestroy(preference);
    // A refusal is an answer too: the caller then plans without it.
    exists_ = status_ == 0 && found > 0 && best.status == 0;
    algorithm_ = best.algorithm;
    workspace_bytes_ = exists_ ? static_cast<int64_t>(best.workspace_bytes) : 0;
  }

  void release() {
    for (CublasLtLayout layout : layouts_) {
      if (layout) api_.MatrixLayoutDestroy(layout);
    }
    api_.MatmulDescDestroy(desc_);
  }

  const CublasLt& api_;
  CublasLtMatmulDesc desc_ = nullptr;
  std::array<CublasLtLayout, 4> layouts_{};  // of B, A, C, Y
  CublasLtAlgorithm algorithm_{};
  bool exists_ = false;
  CublasStatus status_ = 0;
  int64_t workspace_bytes_ = 0;
  std::mutex mutex_;
};

Vendor::Vendor() : api_(cublaslt()) { check_cublaslt(api_.Create(&handle_), "cublasLtCreate"); }

Vendor::~Vendor() {
  known_.clear();
  api_.Destroy(handle_);
}

std::shared_ptr<Vendor::Algorithm> Vendor::algorithm(const Product& product) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = known_.find(product);
  if (known != known_.end()) return known->second;
  if (known_.size() >= kMaxKnown) known_.clear();
  auto fresh = std::make_shared<Algorithm>(api_, handle_, product);
  known_.emplace(product, fresh);
  return fresh;
}

int64_t Vendor::workspace_bytes(const mp_problem& p, const mp_region& r, const Operands& operands) {
  const auto chosen = algorithm(Product(p, r, moved(p, r, operands), r.workspace_bytes));
  if (!chosen->exists()) return -1;
  return chosen->workspace_bytes() ? chosen->workspace_bytes() + kVendorAlignment : 0;
}

void Vendor::launch(const mp_problem& p, const mp_region& r, const Operands& operands,
                    void* workspace, CUstream stream) {
  const Operands here = moved(p, r, operands);
  const auto chosen = algorithm(Product(p, r, here, r.workspace_bytes));
  if (!chosen->exists()) {
    fail(MP_NO_KERNEL, "cuBLASLt has no algorithm for m = ", r.m, ", n = ", r.n, ", k = ", p.k,
         ", batch = ", r.z, ", lda = ", p.lda, ", ldb = ", p.ldb, ", ldc = ", p.ldc, ", bias ",
         p.bias, " at these addresses (status ", chosen->status(), "); plan without it");
  }
  const auto start = reinterpret_cast<uintptr_t>(workspace) + kVendorAlignment - 1;
  chosen->launch(handle_, p, here,
                 reinterpret_cast<void*>(start & ~static_cast<uintptr_t>(kVendorAlignment - 1)),
                 stream);
  stats().launches.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace moonpoly
