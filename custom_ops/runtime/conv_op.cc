#include "conv_op.h"

#include <algorithm>
#include <string>
#include <utility>

#include "conv_planner.h"
#include "conv_shape.h"
#include "conv_weights.h"
#include "driver.h"
#include "error.h"
#include "interpreter.h"
#include "launcher.h"
#include "node.h"
#include "ort.h"
#include "pack.h"
#include "planner.h"
#include "shape.h"

namespace moonpoly {
namespace {

int32_t auto_pad_of(const std::string& value) {
  if (value.empty() || value == "NOTSET") return MP_NOTSET;
  if (value == "SAME_UPPER") return MP_SAME_UPPER;
  if (value == "SAME_LOWER") return MP_SAME_LOWER;
  if (value == "VALID") return MP_VALID;
  fail(MP_INVALID, "auto_pad is '", value, "'; accepted: NOTSET, SAME_UPPER, SAME_LOWER, VALID");
}

mp_conv_attributes read_attributes(const Ort& ort, const OrtKernelInfo* info, bool transposed) {
  mp_conv_attributes a{};
  a.transposed = transposed;
  a.auto_pad = auto_pad_of(ort.text_attribute(info, "auto_pad"));
  a.group = ort.attribute(info, "group", int64_t{1});
  const auto list = [&](const char* name, int64_t* out, int room) {
    const int count = ort.list_attribute(info, name, out, room);
    if (count > room) {
      fail(MP_INVALID, name, " has ", count, " values; there are 1 to 3 spatial dimensions");
    }
    return count;
  };
  a.kernel_count = list("kernel_shape", a.kernel, 3);
  a.stride_count = list("strides", a.stride, 3);
  a.dilation_count = list("dilations", a.dilation, 3);
  a.pad_count = list("pads", a.pad, 6);
  if (transposed) {
    a.output_padding_count = list("output_padding", a.output_padding, 3);
    a.output_shape_count = list("output_shape", a.output_shape, 3);
  }
  if (a.group < 1) fail(MP_INVALID, "group is ", a.group, "; 1 and more are accepted");
  return a;
}

class ConvKernel {
 public:
  ConvKernel(const ConvOp& op, const OrtKernelInfo* info)
      : ort_(op.ort),
        structure_(*op.structure),
        epilogue_(read_epilogue(ort_, info, structure_)),
        attributes_(read_attributes(ort_, info, structure_.transposed())),
        element_{op.dtype, op.settings->precision} {}
  virtual ~ConvKernel() = default;
  const OrtApi* api() const { return ort_.api(); }

  void compute(OrtKernelContext* context) {
    Tensor x, w, b;
    read_input(ort_, context, 0, &x);
    read_input(ort_, context, 1, &w);
    const bool has_bias = structure_.has_bias() && read_input(ort_, context, 2, &b);
    Convolution found;
    convolution(x.shape, w.shape, has_bias ? &b.shape : nullptr, attributes_, element_, &found);
    const void* residual = read_residual(ort_, context, structure_, found.output);
    OrtValue* value = nullptr;
    ort_(ort_->KernelContext_GetOutput(context, 0, found.output.dims, found.output.rank, &value));
    if (found.empty()) return;
    epilogue_.fill(&found.conv);
    if (found.pointwise) epilogue_.fill(&found.product.problem);
    Operands operands{w.data, x.data, has_bias ? b.data : nullptr, nullptr, residual};
    ort_(ort_->GetTensorMutableData(value, &operands.y));
    Operands factors = operands;
    mp_conv& conv = found.conv;
    if (packed_) {
      operands.a = packed_->data();
      conv.w_taps = packed_strides_.w_taps;
      conv.w_g = packed_strides_.w_g;
      conv.w_k = packed_strides_.w_k;
      conv.w_c = packed_strides_.w_c;
      conv.w_h = packed_strides_.w_h;
      conv.w_w = packed_strides_.w_w;
    }
    if (reinterpret_cast<uintptr_t>(operands.a) % 16) conv.w_taps = 0;
    if (found.pointwise) {
      mp_problem& product = found.product.problem;
      if (packed_ && multiplies_copy(conv)) {
        factors.a = packed_->data();
        (found.w_is_a ? product.lda : product.ldb) = packed_strides_.w_k;
      }
      if (!found.w_is_a) std::swap(factors.a, factors.b);
      set_alignment(&found.product, factors.a, factors.b, factors.y, residual);
      if (!is_better_convolved(found, uses(context))) {
        multiply(context, product, factors);
        return;
      }
    }
    convolve(context, conv, operands);
  }

 protected:
  // W is the A of `operands` and X the B.
  virtual void convolve(OrtKernelContext* context, const mp_conv& conv,
                        const Operands& operands) = 0;
  virtual void multiply(OrtKernelContext* context, const mp_problem& problem,
                        const Operands& operands) = 0;

  // What the plans of a run may use: kUsesWorkspace where it can be given scratch memory.
  virtual unsigned uses(OrtKernelContext* context) const = 0;

  // Where W is a constant that is better stored anew: its copy, which `make` makes of (conv, W).
  template <typename Make>
  void pack_constant_weight(const OrtKernelInfo* info, const Settings& settings, Make make) {
    if (!settings.repack) return;
    int constant = 0;
    const OrtValue* value = nullptr;
    ort_(ort_->KernelInfoGetConstantInput_tensor(info, 1, &constant, &value));
    if (!constant || !value) return;
    const Tensor w = tensor_of(ort_, value, 1);
    if (w.shape.rank < 3 || w.shape.rank > 5) return;  // Compute says what is wrong
    mp_conv conv;
    conv_of_weight(w.shape, attributes_, element_, &conv);
    if (always_a_product(conv) && !multiplies_copy(conv)) return;
    if (packed_conv(conv, &packed_strides_) > 0) packed_ = make(conv, w.data);
  }

  const Ort ort_;
  std::shared_ptr<const Planner> planner_;
  std::shared_ptr<const ConvPlanner> conv_planner_;

 private:
  // Kernels of products load rows of an odd number of pixels element by element, as those of
  // convolutions always do, but without loading ahead.
  bool is_better_convolved(const Convolution& found, unsigned uses) const {
    const mp_problem& p = found.product.problem;
    constexpr int64_t kHuge = 1 << 24;
    if (p.align_b == 16 || !found.w_is_a) return false;
    if (out_pixels(found.conv) > kHuge || p.k > kHuge) return false;
    const auto convolved = conv_planner_->planned(found.conv, uses);
    const auto multiplied = planner_->planned(p, uses);
    return convolved->plan.predicted_us < multiplied->plan.predicted_us;
  }

  // Whether the sizes of X make no difference to that.
  bool always_a_product(const mp_conv& conv) const {
    const auto all = [](const int64_t* values, int count, int64_t wanted) {
      return std::all_of(values, values + count, [=](int64_t value) { return value == wanted; });
    };
    return kernel_taps(conv) == 1 && conv.groups == 1 && !conv.transposed &&
           all(attributes_.stride, attributes_.stride_count, 1) &&
           all(attributes_.pad, attributes_.pad_count, 0);
  }

  // Whether the copy of W is the factor of a product, too: where it is rounded. Products whose
  // factors pointers load cut W off, which shrank them by 3.5e-4 on an H200.
  static bool multiplies_copy(const mp_conv& conv) {
    return is_rounded(conv) && kernel_taps(conv) == 1 && conv.groups == 1;
  }

  const OpStructure& structure_;
  const Epilogue epilogue_;
  const mp_conv_attributes attributes_;
  const Element element_;
  mp_conv packed_strides_{};
  std::unique_ptr<const PackedConvWeight> packed_;
};

class CudaConvKernel final : public ConvKernel {
 public:
  CudaConvKernel(const ConvOp& op, const OrtKernelInfo* info)
      : ConvKernel(op, info), allocator_(ort_, info) {
    const int ordinal = ordinal_of(ort_, allocator_);
    mp_device device;
    query_device(ordinal, &device);
    auto pack = op.settings->open_pack(device.sm);
    planner_ = pack->planner(device);
    conv_planner_ = pack->conv_planner(device);
    launcher_ = Launcher::get(std::move(pack), ordinal);
    launcher_->load(op.dtype, op.dtype == MP_F32 ? op.settings->precision : MP_TF32);
    pack_constant_weight(info, *op.settings, [&](const mp_conv& conv, const void* w) {
      return std::make_unique<const PackedConvWeight>(conv, w, launcher_);
    });
    warn_once_without_table(ort_, info, *planner_);
  }

 private:
  void convolve(OrtKernelContext* context, const mp_conv& conv, const Operands& operands) override {
    const CUstream stream = stream_of(ort_, context);
    const auto planned = conv_planner_->planned(conv, uses(context));
    const mp_plan& plan = planned->plan;
    CurrentContext current(launcher_->context());
    const RunMemory memory = memory_for(context, stream, plan);
    launcher_->launch_conv(conv, plan, operands, memory.workspace(), memory.counters(), stream);
  }

  void multiply(OrtKernelContext* context, const mp_problem& problem,
                const Operands& operands) override {
    const CUstream stream = stream_of(ort_, context);
    const auto planned = planner_->planned(problem, uses(context));
    const mp_plan& plan = planned->plan;
    CurrentContext current(launcher_->context());
    const RunMemory memory = memory_for(context, stream, plan);
    launcher_->launch(problem, plan, operands, memory.workspace(), memory.counters(), stream);
  }

  // Of cuBLASLt nothing: products of pixels are not among those that it was measured on.
  unsigned uses(OrtKernelContext* context) const override {
    return stream_of(ort_, context) ? kUsesWorkspace : 0;
  }

  RunMemory memory_for(OrtKernelContext* context, CUstream stream, const mp_plan& plan) const {
    return RunMemory(ort_, context, allocator_, launcher_.get(), stream, plan.workspace_bytes,
                     plan.counters);
  }

  const KernelAllocator allocator_;
  std::shared_ptr<Launcher> launcher_;
};

class InterpretedConvKernel final : public ConvKernel {
 public:
  InterpretedConvKernel(const ConvOp& op, const OrtKernelInfo* info) : ConvKernel(op, info) {
    const auto [pack, device] = interpreted_on(*op.settings);
    pack_ = pack;
    planner_ = pack_->planner(device);
    conv_planner_ = pack_->conv_planner(device);
    pack_constant_weight(info, *op.settings, [](const mp_conv& conv, const void* w) {
      return std::make_unique<const PackedConvWeight>(conv, w);
    });
  }

 private:
  void convolve(OrtKernelContext*, const mp_conv& conv, const Operands& operands) override {
    const auto planned = conv_planner_->planned(conv, kUsesWorkspace);
    // The function takes X first.
    const Operands x_first{operands.b, operands.a, operands.bias, operands.y, operands.residual};
    interpret(conv_interpreter().load(), kSetters, conv, planned->plan, x_first);
  }

  void multiply(OrtKernelContext*, const mp_problem& problem, const Operands& operands) override {
    const auto planned = planner_->planned(problem, kUsesWorkspace);
    interpret(interpreter().load(), kSetters, problem, planned->plan, operands);
  }

  unsigned uses(OrtKernelContext*) const override { return kUsesWorkspace; }

  static constexpr const char* kSetters = "mp_set_interpreter and mp_set_conv_interpreter";
  std::shared_ptr<const Pack> pack_;
};

}  // namespace

ConvOp::ConvOp(const Ort& ort, const OpStructure& structure, int32_t dtype,
               std::shared_ptr<const Settings> settings)
    : NodeOp{{}, ort, &structure, dtype, std::move(settings)} {
  set_common_slots(this);
  set_kernel_slots<ConvOp, ConvKernel, CudaConvKernel, InterpretedConvKernel>(this);
}

}  // namespace moonpoly
