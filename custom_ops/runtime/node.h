// What the ops of products and those of convolutions share: the slots that ONNX Runtime reads, the
// inputs and the memory of a run, the device that plans are made for, the call of the interpreter.
#ifndef MOONPOLY_NODE_H_
#define MOONPOLY_NODE_H_

#include <memory>
#include <utility>

#include "driver.h"
#include "error.h"
#include "launcher.h"
#include "ops.h"
#include "ort.h"
#include "pack.h"
#include "shape.h"

namespace moonpoly {

struct Tensor {
  Shape shape;
  void* data = nullptr;
};

inline Tensor tensor_of(const Ort& ort, const OrtValue* value, size_t index) {
  Tensor out;
  if (!ort.tensor(value, &out.shape, &out.data)) {
    fail(MP_INVALID, "input ", index, " has rank ", out.shape.rank, "; at most ", kMaxRank,
         " is possible");
  }
  return out;
}

// False where the node has no such input.
inline bool read_input(const Ort& ort, OrtKernelContext* context, size_t index, Tensor* out) {
  size_t count = 0;
  ort(ort->KernelContext_GetInputCount(context, &count));
  if (index >= count) return false;
  const OrtValue* value = nullptr;
  ort(ort->KernelContext_GetInput(context, index, &value));
  if (!value) return false;
  *out = tensor_of(ort, value, index);
  return true;
}

inline CUstream stream_of(const Ort& ort, OrtKernelContext* context) {
  void* handle = nullptr;
  ort(ort->KernelContext_GetGPUComputeStream(context, &handle));
  return static_cast<CUstream>(handle);
}

inline int ordinal_of(const Ort& ort, const KernelAllocator& allocator) {
  int ordinal = 0;
  ort(ort->MemoryInfoGetId(allocator.memory(), &ordinal));
  return ordinal;
}

// Scratch memory and arrival counters of one run, for `workspace` bytes; the launcher's context is
// the current one.
//
// Ordered by the stream: ONNX Runtime hands this memory to another stream only after a
// synchronisation, so that it may be freed as soon as the launches are queued. There is room for
// counters in it even where none are needed there: a captured run, which cannot make the arena
// grow, then asks for what the runs before it did.
class RunMemory {
 public:
  RunMemory(const Ort& ort, const OrtKernelContext* context, const KernelAllocator& allocator,
            Launcher* launcher, CUstream stream, int64_t workspace, int64_t counters)
      : counters_(counters ? launcher->counters_for(stream, counters) : nullptr),
        scratch_(ort, context, allocator,
                 workspace + counters * static_cast<int64_t>(sizeof(int32_t))) {
    if (counters && !counters_) {
      counters_ = static_cast<char*>(scratch_.data()) + workspace;
      launcher->clear(counters_, counters, stream);
    }
  }
  void* workspace() const { return scratch_.data(); }
  void* counters() const { return counters_; }

 private:
  void* counters_;
  const Scratch scratch_;
};

// The interpreter's pack, and the device whose plans it runs: the GPU that is there if the pack is
// for it, else the reference.
inline std::pair<std::shared_ptr<const Pack>, mp_device> interpreted_on(const Settings& settings) {
  mp_device device{};
  const bool gpu = device_count() > 0;
  if (gpu) query_device(0, &device);
  auto pack = settings.open_pack(gpu ? device.sm : 90);
  const int pack_sm = static_cast<int>(pack->header().sm);
  if (!gpu || device.sm != pack_sm) device = reference_device(pack_sm);
  return {std::move(pack), device};
}

// `setters`: what sets the function, for the error where nothing has.
template <typename Function, typename Problem>
void interpret(Function function, const char* setters, const Problem& problem, const mp_plan& plan,
               const Operands& operands) {
  if (!function) {
    fail(MP_INTERNAL, "the interpreter backend has no function to call: set one with ", setters,
         ", or use moonpoly_ort.InferenceSession(backend=\"interpreter\")");
  }
  char text[2048] = "";
  const int32_t failed =
      function(&problem, &plan, operands.a, operands.b, operands.bias, operands.residual,
               operands.y, text, static_cast<int32_t>(sizeof text));
  if (failed) fail(MP_INTERNAL, "the interpreter failed: ", text[0] ? text : "no reason given");
}

// The slots that do not depend on what the op computes.
inline void set_common_slots(NodeOp* op) {
  op->version = kOrtApiVersion;
  op->GetExecutionProviderType = [](const OrtCustomOp* op) {
    const bool interpreted =
        static_cast<const NodeOp*>(op)->settings->backend == Backend::kInterpreter;
    return interpreted ? "CPUExecutionProvider" : "CUDAExecutionProvider";
  };
  op->GetInputType = [](const OrtCustomOp* op, size_t) {
    static constexpr OnnxType kTypes[] = {ONNX_FLOAT16, ONNX_BFLOAT16, ONNX_FLOAT};
    return kTypes[static_cast<const NodeOp*>(op)->dtype];
  };
  op->GetOutputType = [](const OrtCustomOp* op, size_t index) {
    const auto& my = *static_cast<const NodeOp*>(op);
    return my.structure->wide() ? ONNX_FLOAT : my.GetInputType(op, index);
  };
  op->GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op->GetName = [](const OrtCustomOp* op) {
    return static_cast<const NodeOp*>(op)->structure->name.c_str();
  };
  op->GetInputTypeCount = [](const OrtCustomOp* op) {
    return static_cast<size_t>(static_cast<const NodeOp*>(op)->structure->inputs());
  };
  // A third input that adds a bias may be missing where it does not give the name.
  op->GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) {
    const OpStructure& structure = *static_cast<const NodeOp*>(op)->structure;
    const bool optional = index == 2 && structure.has_bias() && !structure.needs_bias();
    return optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op->GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op->GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op->GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op->GetEndVersion = [](const OrtCustomOp*) { return 1; };
}

// R of a node, at the place that follows its base's inputs; null where its operator has none.
// Throws Error(MP_INVALID) where it has not the output's shape.
inline const void* read_residual(const Ort& ort, OrtKernelContext* context,
                                 const OpStructure& structure, const Shape& output) {
  if (structure.residual == MP_RESIDUAL_NONE) return nullptr;
  Tensor residual;
  if (!read_input(ort, context, structure.base_inputs(), &residual)) {
    fail(MP_INVALID, structure.name, ": the last input is missing");
  }
  check_residual(structure.name, residual.shape, output);
  return residual.data;
}

// The slots that make, run and destroy an op's kernels: `Cuda` or `Interpreted`, both `Kernel`s.
template <typename Op, typename Kernel, typename Cuda, typename Interpreted>
void set_kernel_slots(Op* op) {
  op->CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                          void** out) {
    const Op& my = *static_cast<const Op*>(op);
    return guarded(my.ort.api(), [&] {
      std::unique_ptr<Kernel> kernel;
      try {
        if (my.settings->backend == Backend::kInterpreter) {
          kernel = std::make_unique<Interpreted>(my, info);
        } else {
          kernel = std::make_unique<Cuda>(my, info);
        }
      } catch (const Error& e) {
        fail(e.status, "node '", my.ort.node_name(info), "': ", e.what());
      }
      *out = kernel.release();
    });
  };
  op->KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    auto* my = static_cast<Kernel*>(kernel);
    return guarded(my->api(), [&] { my->compute(context); });
  };
  op->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

}  // namespace moonpoly
#endif  // MOONPOLY_NODE_H_
