// The custom ops ai.moonpoly.MatMul, MatMulBias and Gemm, and those with epilogues, as ONNX Runtime
// sees them.
#ifndef MOONPOLY_OPS_H_
#define MOONPOLY_OPS_H_

#include <memory>
#include <string>
#include <vector>

#include "moonpoly.h"
#include "op_structure.h"
#include "ort.h"
#include "ort_abi.h"

namespace moonpoly {

class Pack;
class Planner;

enum class Backend { kAuto, kCuda, kInterpreter };
// Of cuBLASLt as a candidate. kAuto: where it was measured on the GPU and its library is there.
enum class VendorUse { kAuto, kOff, kOn };

// What a session asked for, read once at registration.
struct Settings {
  Backend backend = Backend::kAuto;
  int32_t precision = MP_TF32;
  VendorUse vendor = VendorUse::kOff;
  bool repack = true;                     // constant weights, where their rows ask for it
  std::string pack_path;                  // empty: search
  std::vector<std::string> pack_folders;  // in order

  // Throws Error(MP_BAD_PACK) naming what was searched.
  std::shared_ptr<const Pack> open_pack(int sm) const;
};

// Attributes of the GPU that plans are made for where there is none: NVIDIA H200 SXM, data sheet
// and driver values. Its `sm` is taken from the pack, so that packs of every architecture can be
// run.
mp_device reference_device(int sm);

// Tells the log, once in a process, of a GPU that no costs were measured on.
void warn_once_without_table(const Ort& ort, const OrtKernelInfo* info, const Planner& planner);

// One op for one dtype. ONNX Runtime keeps pointers to it for as long as a session lives, so that
// it is never destroyed.
struct NodeOp : OrtCustomOp {
  Ort ort;
  const OpStructure* structure;
  int32_t dtype;
  std::shared_ptr<const Settings> settings;
};

struct Op : NodeOp {
  // `structure`: one of products, from op_structures().
  Op(const Ort& ort, const OpStructure& structure, int32_t dtype,
     std::shared_ptr<const Settings> settings);
};

}  // namespace moonpoly
#endif  // MOONPOLY_OPS_H_
