// The vendor's library as one more micro-kernel: cuBLASLt on the call's stream. A plan names it by
// the kernel number MP_VENDOR. The algorithm for a product is cuBLASLt's own first choice, asked
// for when the product is first met (host work alone) and then remembered.
#ifndef MOONPOLY_VENDOR_H_
#define MOONPOLY_VENDOR_H_

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cublaslt.h"
#include "launcher.h"
#include "moonpoly.h"

namespace moonpoly {

// What cuBLASLt may take of the workspace: as much as cuBLAS takes itself on sm_90, without which
// its heuristic leaves out split-K algorithms; and room to align it, since it wants 256 bytes.
constexpr int64_t kVendorWorkspace = int64_t{32} << 20;
constexpr int64_t kVendorAlignment = 256;

// Why cuBLASLt is no candidate for a problem, or null if it is one. Planner and launcher ask it.
const char* vendor_refusal(const mp_problem& problem);

bool uses_vendor(const mp_plan& plan);

// A cuBLASLt handle on one device. Safe to use from several threads.
class Vendor {
 public:
  // The device's context must be current. Throws Error(MP_NO_DRIVER) where there is no cuBLASLt.
  Vendor();
  ~Vendor();
  Vendor(const Vendor&) = delete;
  Vendor& operator=(const Vendor&) = delete;

  // Bytes of workspace that a region of a plan takes for these operands, 0 to its workspace_bytes;
  // -1 where cuBLASLt has no algorithm for it.
  int64_t workspace_bytes(const mp_problem& problem, const mp_region& region,
                          const Operands& operands);

  // Throws Error(MP_NO_KERNEL) where cuBLASLt has no algorithm. `workspace` holds what
  // workspace_bytes said or more.
  void launch(const mp_problem& problem, const mp_region& region, const Operands& operands,
              void* workspace, CUstream stream);

 private:
  struct Product;
  class Algorithm;
  struct Hash {
    size_t operator()(const Product& product) const;
  };
  std::shared_ptr<Algorithm> algorithm(const Product& product);

  const CublasLt& api_;
  CublasLtHandle handle_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<Product, std::shared_ptr<Algorithm>, Hash> known_;
};

}  // namespace moonpoly
#endif  // MOONPOLY_VENDOR_H_
