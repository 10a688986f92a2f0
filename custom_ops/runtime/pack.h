// A kernel pack: one memory-mapped file, checked once, shared by every session of the process.
#ifndef MOONPOLY_PACK_H_
#define MOONPOLY_PACK_H_

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moonpoly.h"

namespace moonpoly {

class ConvPlanner;
class Planner;

// Launch arguments of a kernel after DESC parameters are expanded; packs that need more are
// refused.
constexpr int kMaxArguments = 64;

inline int element_bytes(int32_t dtype) { return dtype == MP_F32 ? 4 : 2; }

// Of an element of Y.
inline int output_bytes(const mp_problem& p) { return p.wide ? 4 : element_bytes(p.dtype); }

// Columns of Y that columns of the product amount to.
inline int64_t output_columns(const mp_problem& p, int64_t columns) {
  return p.gated ? columns / 2 : columns;
}

inline bool uses_tensor_maps(int32_t family) {
  return family == MP_GEMM_TMA || family == MP_GEMM_WS || family == MP_GEMM_TMA_MASKED;
}
inline bool is_convolution(int32_t family) { return family >= MP_CONV; }
inline bool is_convolution(const mp_kernel& kernel) { return is_convolution(kernel.family); }
inline bool is_depthwise(int32_t family) {
  return family == MP_CONV_DEPTHWISE || family == MP_CONV_DEPTHWISE_TRANSPOSED;
}
inline bool is_depthwise(const mp_kernel& kernel) { return is_depthwise(kernel.family); }
// Depthwise kernels add up in fp32 on the scalar units, whichever precision is asked for.
inline bool computes_in(const mp_kernel& kernel, int32_t dtype, int32_t precision) {
  return kernel.dtype == dtype &&
         (dtype != MP_F32 || kernel.precision == precision || is_depthwise(kernel));
}

class Pack {
 public:
  // Maps and verifies the file; a file that is open already is shared (same inode and time stamp).
  // Throws Error(MP_BAD_PACK).
  static std::shared_ptr<const Pack> open(const std::string& path);
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const { return path_; }
  const mp_pack_header& header() const { return *at<mp_pack_header>(0); }
  int kernel_count() const { return static_cast<int>(header().kernel_count); }
  const mp_kernel& kernel(int index) const { return at<mp_kernel>(header().kernels_offset)[index]; }
  const int32_t* params(const mp_kernel& kernel) const {
    return at<int32_t>(header().params_offset) + kernel.param_offset;
  }
  const void* cubin(const mp_kernel& kernel) const { return at<char>(kernel.cubin_offset); }
  bool is_catalog() const { return kernel(0).cubin_bytes == 0; }

  // Kernels of one class: the planner visits only those.
  const std::vector<int>& kernels_of(int dtype, int precision, bool trans_a, bool trans_b) const {
    return classes_[class_index(dtype, precision, trans_a, trans_b)];
  }
  // Kernels of convolutions, which are in none of those classes.
  const std::vector<int>& convolutions() const { return convolutions_; }
  // The costs measured on exactly this GPU, one per kernel, or null. `table` receives their header.
  const mp_cost* costs_for(const mp_device& device, const mp_table** table) const;
  // What a table says of cuBLASLt: table->vendor_count entries.
  const mp_vendor_cost* vendor_costs(const mp_table& table) const {
    const auto* costs = reinterpret_cast<const mp_cost*>(&table + 1);
    return reinterpret_cast<const mp_vendor_cost*>(costs + kernel_count());
  }

  // The planner of this pack for a device; made once per device.
  std::shared_ptr<const Planner> planner(const mp_device& device) const;
  std::shared_ptr<const ConvPlanner> conv_planner(const mp_device& device) const;

 private:
  Pack() = default;
  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(data_ + offset);
  }
  static int class_index(int dtype, int precision, bool trans_a, bool trans_b) {
    return ((dtype * 2 + precision) * 2 + trans_a) * 2 + trans_b;
  }
  int64_t table_bytes(const mp_table& table) const {
    return sizeof(mp_table) + int64_t{kernel_count()} * sizeof(mp_cost) +
           int64_t{table.vendor_count} * sizeof(mp_vendor_cost);
  }
  void verify() const;
  void verify_tables() const;
  void verify_kernel(int index) const;

  std::string path_;
  const char* data_ = nullptr;
  size_t bytes_ = 0;
  std::array<std::vector<int>, 24> classes_;
  std::vector<int> convolutions_;
  mutable std::mutex planners_mutex_;
  mutable std::map<std::string, std::shared_ptr<const Planner>> planners_;
  mutable std::map<const Planner*, std::shared_ptr<const ConvPlanner>> conv_planners_;
};

}  // namespace moonpoly
#endif  // MOONPOLY_PACK_H_
