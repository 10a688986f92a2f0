#include "ops.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <utility>

#include "driver.h"
#include "error.h"
#include "interpreter.h"
#include "launcher.h"
#include "node.h"
#include "ort.h"
#include "pack.h"
#include "planner.h"
#include "shape.h"
#include "shape_inference.h"
#include "vendor.h"
#include "weights.h"

namespace moonpoly {
namespace {

// The rank of the B that a node transposes. Throws Error(MP_INVALID) where perm does more than to
// exchange the last two axes.
int transposed_rank(const Ort& ort, const OrtKernelInfo* info) {
  int64_t perm[kMaxRank];
  const int rank = ort.list_attribute(info, "perm", perm, kMaxRank);
  bool fits = rank >= 2 && rank <= kMaxRank;
  for (int i = 0; fits && i < rank; ++i) {
    const int64_t axis = i < rank - 2 ? i : 2 * rank - 3 - i;
    fits = perm[i] == axis;
  }
  if (!fits) {
    fail(MP_INVALID, "MatMulTransposed: perm must exchange the last two axes of B, as 0, 1, 3, 2, ",
         "and nothing else");
  }
  return rank;
}

class Kernel {
 public:
  Kernel(const Op& op, const OrtKernelInfo* info)
      : ort_(op.ort),
        element_{op.dtype, op.settings->precision},
        structure_(*op.structure),
        epilogue_(read_epilogue(ort_, info, structure_)) {
    if (structure_.gemm()) {
      gemm_.trans_a = ort_.attribute(info, "transA", int64_t{0}) != 0;
      gemm_.trans_b = ort_.attribute(info, "transB", int64_t{0}) != 0;
    }
    if (structure_.turned()) {
      perm_size_ = transposed_rank(ort_, info);
      gemm_.trans_b = true;
    }
    if (structure_.scales()) {
      gemm_.alpha = ort_.attribute(info, "alpha", 1.0f);
      gemm_.beta = ort_.attribute(info, "beta", 1.0f);
    }
  }
  virtual ~Kernel() = default;
  const OrtApi* api() const { return ort_.api(); }

  void compute(OrtKernelContext* context) {
    Tensor a, b, c;
    read_input(ort_, context, 0, &a);
    read_input(ort_, context, 1, &b);
    const bool has_c = structure_.has_bias() && read_input(ort_, context, 2, &c);

    Product product;
    if (structure_.gemm()) {
      gemm_product(a.shape, b.shape, has_c ? &c.shape : nullptr, gemm_, element_, &product);
    } else {
      if (structure_.turned() && b.shape.rank != perm_size_) {
        fail(MP_INVALID, structure_.name, ": perm has ", perm_size_, " axes, and B is ",
             b.shape.text());
      }
      matmul_product(a.shape, b.shape, gemm_.trans_b, element_, &product);
      if (has_c) add_column_bias(structure_.name, c.shape, b.shape, gemm_.beta, &product);
      product.problem.alpha = gemm_.alpha;
    }
    if (structure_.gated()) gate_columns(structure_.name, b.shape, &product);
    product.problem.wide = structure_.wide();
    epilogue_.fill(&product.problem);
    const void* residual = read_residual(ort_, context, structure_, product.output);
    OrtValue* value = nullptr;
    ort_(ort_->KernelContext_GetOutput(context, 0, product.output.dims, product.output.rank,
                                       &value));
    if (product.empty()) return;
    Operands operands{a.data, b.data, product.problem.bias ? c.data : nullptr, nullptr, residual};
    ort_(ort_->GetTensorMutableData(value, &operands.y));
    if (product.swapped) std::swap(operands.a, operands.b);
    set_alignment(&product, operands.a, operands.b, operands.y, residual);
    execute(context, product, operands);
  }

 protected:
  virtual void execute(OrtKernelContext* context, const Product& product,
                       const Operands& operands) = 0;

  std::shared_ptr<const Planned> plan(const Planner& planner, const Product& product, unsigned uses,
                                      bool again = false) const {
    const mp_copy* copy = weight_ ? weight_->copy_for(product) : nullptr;
    return planner.planned(product.problem, uses, copy, again);
  }

  // The B that a plan is for.
  const void* factor(const Planned& planned, const Operands& operands) const {
    return planned.repacked ? weight_->data() : operands.b;
  }

  // Calls `body` with the operands of every entry of the outer loops.
  template <typename Body>
  void for_each_launch(const Planned& planned, const Product& product, const Operands& operands,
                       Body body) const {
    const int64_t bytes = element_bytes(product.problem.dtype);
    const int64_t y_bytes = output_bytes(product.problem);
    int64_t index[kMaxRank] = {};
    for (;;) {
      int64_t a = 0, b = 0, y = 0;
      for (int i = 0; i < product.loop_count; ++i) {
        a += index[i] * product.loops[i].a_stride;
        b += index[i] * product.loops[i].b_stride;
        y += index[i] * product.loops[i].y_stride;
      }
      body(Operands{
          static_cast<const char*>(operands.a) + a * bytes,
          static_cast<const char*>(factor(planned, operands)) + (planned.repacked ? 0 : b * bytes),
          operands.bias, static_cast<char*>(operands.y) + y * y_bytes,
          operands.residual ? static_cast<const char*>(operands.residual) + y * bytes : nullptr});
      int i = 0;
      while (i < product.loop_count && ++index[i] == product.loops[i].count) index[i++] = 0;
      if (i == product.loop_count) return;
    }
  }

  const Ort ort_;
  const Element element_;
  GemmAttributes gemm_;
  std::unique_ptr<const RepackedWeight> weight_;  // null: B is used as it is stored

 private:
  const OpStructure& structure_;
  const Epilogue epilogue_;
  int perm_size_ = 0;  // the rank of a B that is transposed
};

// Whether a session's plans on a GPU may use cuBLASLt.
bool takes_vendor(VendorUse use, const Planner& planner) {
  if (use == VendorUse::kOff) return false;
  if (use == VendorUse::kOn && !planner.has_vendor()) {
    fail(MP_BAD_PACK, "moonpoly.vendor is 1, but the kernel pack has no timings of cuBLASLt on ",
         planner.device().name, "; set it to auto or 0, or tune for this GPU");
  }
  return planner.has_vendor() && (use == VendorUse::kOn || try_cublaslt(nullptr));
}

class CudaKernel final : public Kernel {
 public:
  CudaKernel(const Op& op, const OrtKernelInfo* info) : Kernel(op, info), allocator_(ort_, info) {
    const int ordinal = ordinal_of(ort_, allocator_);
    mp_device device;
    query_device(ordinal, &device);
    auto pack = op.settings->open_pack(device.sm);
    planner_ = pack->planner(device);
    launcher_ = Launcher::get(std::move(pack), ordinal);
    launcher_->load(op.dtype, op.dtype == MP_F32 ? op.settings->precision : MP_TF32);
    if (takes_vendor(op.settings->vendor, *planner_)) load_vendor(op.settings->vendor, info);
    if (op.settings->repack) {
      weight_ =
          RepackedWeight::on_device(ort_, info, element_, gemm_.trans_b, *planner_, launcher_);
    }
    warn_once_without_table(ort_, info, *planner_);
  }

 private:
  void execute(OrtKernelContext* context, const Product& product,
               const Operands& operands) override {
    const CUstream stream = stream_of(ort_, context);
    // Without a stream of its own a run gets no stream-ordered scratch memory: plan without
    // split-K.
    const unsigned uses = (stream ? kUsesWorkspace : 0) | (product.loop_count == 0 ? vendor_ : 0);
    auto planned = plan(*planner_, product, uses);

    CurrentContext current(launcher_->context());
    int64_t workspace = planned->plan.workspace_bytes;
    if (uses_vendor(planned->plan)) {
      Operands seen = operands;
      seen.b = factor(*planned, operands);
      workspace = launcher_->vendor_workspace(planned->launched, planned->plan, seen);
      if (workspace < 0) {
        planned = plan(*planner_, product, uses & ~kUsesVendor, true);
        workspace = planned->plan.workspace_bytes;
      }
    }
    const mp_plan& chosen = planned->plan;
    const RunMemory memory(ort_, context, allocator_, launcher_.get(), stream, workspace,
                           chosen.counters);
    for_each_launch(*planned, product, operands, [&](const Operands& moved) {
      launcher_->launch(planned->launched, chosen, moved, memory.workspace(), memory.counters(),
                        stream);
    });
  }

  void load_vendor(VendorUse use, const OrtKernelInfo* info) {
    try {
      launcher_->load_vendor();
      vendor_ = kUsesVendor;
    } catch (const Error& e) {
      if (use == VendorUse::kOn) throw;
      ort_.warn(info, std::string("MoonPoly plans without cuBLASLt: ") + e.what());
    }
  }

  const KernelAllocator allocator_;
  unsigned vendor_ = 0;  // or kUsesVendor
  std::shared_ptr<const Planner> planner_;
  std::shared_ptr<Launcher> launcher_;
};

class InterpretedKernel final : public Kernel {
 public:
  InterpretedKernel(const Op& op, const OrtKernelInfo* info) : Kernel(op, info) {
    const auto [pack, device] = interpreted_on(*op.settings);
    pack_ = pack;
    planner_ = pack_->planner(device);
    if (op.settings->repack) {
      weight_ = RepackedWeight::on_host(ort_, info, element_, gemm_.trans_b, *planner_, *pack_);
    }
  }

 private:
  void execute(OrtKernelContext*, const Product& product, const Operands& operands) override {
    const auto planned = plan(*planner_, product, kUsesWorkspace);
    for_each_launch(*planned, product, operands, [&](const Operands& moved) {
      interpret(interpreter().load(), "mp_set_interpreter", planned->launched, planned->plan,
                moved);
    });
  }

  std::shared_ptr<const Pack> pack_;
  std::shared_ptr<const Planner> planner_;
};

}  // namespace

void warn_once_without_table(const Ort& ort, const OrtKernelInfo* info, const Planner& planner) {
  static std::atomic<bool> warned{false};
  if (planner.has_table() || warned.exchange(true)) return;
  const std::string text = std::string("MoonPoly has no measured table for the GPU ") +
                           planner.device().name +
                           "; kernels are chosen by an analytic model, which is less exact.";
  ort.warn(info, text);
}

mp_device reference_device(int sm) {
  mp_device d{};
  std::snprintf(d.name, sizeof d.name, "NVIDIA H200");
  d.sm = sm;
  d.sm_count = 132;
  d.shared_per_sm = 233472;
  d.shared_per_block = 232448;
  d.registers_per_sm = 65536;
  d.threads_per_sm = 2048;
  d.blocks_per_sm = 32;
  d.clock_mhz = 1980;
  d.memory_clock_mhz = 3201;
  d.memory_bus_bits = 6144;
  d.l2_bytes = int64_t{60} << 20;
  d.memory_bytes = int64_t{141} << 30;
  return d;
}

std::shared_ptr<const Pack> Settings::open_pack(int sm) const {
  if (!pack_path.empty()) return Pack::open(pack_path);
  // Code for an earlier sm_8x runs on every later one.
  std::vector<int> fits{sm};
  for (int lower = sm - 1; sm < 90 && lower >= sm / 10 * 10; --lower) fits.push_back(lower);
  std::string searched;
  for (const std::string& folder : pack_folders) {
    for (int candidate : fits) {
      const std::string path = folder + "/sm_" + std::to_string(candidate) + ".mpk";
      if (::access(path.c_str(), F_OK) == 0) return Pack::open(path);
    }
    searched += (searched.empty() ? "" : ", ") + folder;
  }
  fail(MP_BAD_PACK, "no kernel pack sm_", sm, ".mpk was found in ", searched,
       "; build one with `moonpoly pack --arch sm_", sm,
       "`, or name one in the session config entry moonpoly.pack");
}

Op::Op(const Ort& ort, const OpStructure& structure, int32_t dtype,
       std::shared_ptr<const Settings> settings)
    : NodeOp{{}, ort, &structure, dtype, std::move(settings)} {
  set_common_slots(this);
  set_kernel_slots<Op, Kernel, CudaKernel, InterpretedKernel>(this);
  if (!structure.gemm()) {
    InferOutputShapeFn = [](const OrtCustomOp* op, OrtShapeInferContext* context) {
      const auto& my = *static_cast<const Op*>(op);
      return infer_matmul_shape(my.ort, context, *my.structure);
    };
  }
}

}  // namespace moonpoly
