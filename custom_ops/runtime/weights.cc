#include "weights.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "launcher.h"
#include "pack.h"
#include "packing.h"
#include "planner.h"

namespace moonpoly {
namespace {

// A constant input 1 of two dimensions as the B of a problem.
bool constant_b(const Ort& ort, const OrtKernelInfo* info, Element element, bool trans_b,
                mp_problem* p, const void** data) {
  int constant = 0;
  const OrtValue* value = nullptr;
  ort(ort->KernelInfoGetConstantInput_tensor(info, 1, &constant, &value));
  if (!constant || !value) return false;
  Shape shape;
  void* address = nullptr;
  if (!ort.tensor(value, &shape, &address) || shape.rank != 2) return false;
  *p = mp_problem{};
  p->dtype = element.dtype;
  p->precision = element.dtype == MP_F32 ? element.precision : MP_TF32;
  p->trans_b = trans_b;
  p->m = p->batch = p->a_div = p->a_mod = p->b_div = p->b_mod = 1;
  p->n = shape.dims[!trans_b];
  p->k = shape.dims[trans_b];
  p->ldb = shape.dims[1];
  const uint64_t bits =
      uint64_t(p->ldb) * element_bytes(p->dtype) | reinterpret_cast<uintptr_t>(address) | 16;
  p->align_b = static_cast<int32_t>(bits & (~bits + 1));
  *data = address;
  return true;
}

template <typename T>
void copy_rows(const mp_problem& p, const mp_copy& copy, const void* from, void* to) {
  const T* source = static_cast<const T*>(from);
  T* target = static_cast<T*>(to);
  for (int64_t row = 0; row < p.n; ++row) {
    for (int64_t k = 0; k < p.k; ++k) {
      target[row * copy.pitch + k] = source[copy.transposed ? k * p.ldb + row : row * p.ldb + k];
    }
  }
}

}  // namespace

std::unique_ptr<RepackedWeight> RepackedWeight::on_device(const Ort& ort, const OrtKernelInfo* info,
                                                          Element element, bool trans_b,
                                                          const Planner& planner,
                                                          std::shared_ptr<Launcher> launcher) {
  mp_problem p;
  const void* stored;
  if (!constant_b(ort, info, element, trans_b, &p, &stored)) return nullptr;
  const mp_copy copy = repacked(launcher->pack(), p);
  if (copy.bytes == 0 || !planner.usable(copy)) return nullptr;
  CurrentContext current(launcher->context());
  if (!is_device_memory(stored)) return nullptr;
  std::unique_ptr<RepackedWeight> weight(new RepackedWeight);
  if (driver().MemAlloc(&weight->memory_, static_cast<size_t>(copy.bytes)) != 0) {
    weight->memory_ = 0;
    ort.warn(info, "MoonPoly has no " + std::to_string(copy.bytes) +
                       " bytes of GPU memory for a copy of the weight of node '" +
                       ort.node_name(info) +
                       "' with aligned rows, and multiplies it as it is stored; the session config "
                       "entry moonpoly.repack=0 turns such copies off");
    return nullptr;
  }
  weight->launcher_ = std::move(launcher);
  weight->copy_ = copy;
  weight->data_ = reinterpret_cast<void*>(weight->memory_);
  // ONNX Runtime has stored the weights before it creates kernels.
  weight->launcher_->copy(p, copy, 1, stored, reinterpret_cast<void*>(weight->memory_), nullptr);
  check(driver().StreamSynchronize(nullptr), "cuStreamSynchronize after copying a weight");
  return weight;
}

std::unique_ptr<RepackedWeight> RepackedWeight::on_host(const Ort& ort, const OrtKernelInfo* info,
                                                        Element element, bool trans_b,
                                                        const Planner& planner, const Pack& pack) {
  mp_problem p;
  const void* stored;
  if (!constant_b(ort, info, element, trans_b, &p, &stored)) return nullptr;
  const mp_copy copy = repacked(pack, p);
  if (copy.bytes == 0 || !planner.usable(copy)) return nullptr;
  std::unique_ptr<RepackedWeight> weight(new RepackedWeight);
  weight->copy_ = copy;
  weight->host_.resize(copy.bytes + 16);
  char* aligned = weight->host_.data();
  aligned += -reinterpret_cast<uintptr_t>(aligned) % 16;
  weight->data_ = aligned;
  (element_bytes(p.dtype) == 4 ? copy_rows<uint32_t> : copy_rows<uint16_t>)(p, copy, stored,
                                                                            aligned);
  return weight;
}

RepackedWeight::~RepackedWeight() {
  if (!memory_) return;
  // At process exit the driver may be gone before us; its refusals then mean nothing.
  CUcontext popped;
  const Driver& api = driver();
  if (api.CtxPushCurrent(launcher_ ? launcher_->context() : nullptr) != 0) return;
  api.MemFree(memory_);
  api.CtxPopCurrent(&popped);
}

const mp_copy* RepackedWeight::copy_for(const Product& product) const {
  return product.swapped || product.problem.b_mod != 1 ? nullptr : &copy_;
}

}  // namespace moonpoly
