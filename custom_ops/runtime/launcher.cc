#include "launcher.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <system_error>
#include <thread>

#include "error.h"
#include "op_structure.h"
#include "pack.h"
#include "packing.h"
#include "planner.h"
#include "prediction.h"
#include "regions.h"
#include "stats.h"
#include "vendor.h"

namespace moonpoly {
namespace {

// The operands of one region, moved to its first row and column.
struct Views {
  Matrix operand[3];  // A, B, Y
  const char *bias, *residual;

  Views(const mp_problem& p, const mp_region& r, const Operands& o) {
    const int64_t bytes = element_bytes(p.dtype);
    const auto moved = [bytes](const void* base, int64_t elements) {
      return base ? static_cast<const char*>(base) + elements * bytes : nullptr;
    };
    const auto entries = [&](int32_t div, int32_t mod) {
      return std::min<int64_t>(mod, (p.batch + div - 1) / div);
    };
    operand[0] = {moved(o.a, p.trans_a ? r.m0 : r.m0 * p.lda),
                  entries(p.a_div, p.a_mod),
                  p.trans_a ? p.k : r.m,
                  p.trans_a ? r.m : p.k,
                  p.lda,
                  p.a_batch_stride};
    operand[1] = {moved(o.b, p.trans_b ? r.n0 * p.ldb : r.n0),
                  entries(p.b_div, p.b_mod),
                  p.trans_b ? r.n : p.k,
                  p.trans_b ? p.k : r.n,
                  p.ldb,
                  p.b_batch_stride};
    // Of a wide Y a kernel sees as many elements of its own type; it goes by the pointer alone.
    const int64_t at_y = r.m0 * p.ldc + output_columns(p, r.n0), scale = output_bytes(p) / bytes;
    operand[2] = {moved(o.y, at_y * scale), p.batch, r.m,
                  output_columns(p, r.n),   p.ldc,   p.c_batch_stride};
    bias = moved(o.bias, r.m0 * p.bias_stride_m + r.n0 * p.bias_stride_n);
    // Where gemm_ws stores by pointer it finds Y here (ws_epilogue.store_tile).
    residual = p.gated || p.wide ? operand[2].base : moved(o.residual, at_y);
    for (Matrix& x : operand) {
      // The stride of a single entry is never used, but a tensor map wants a legal one.
      if (x.entries == 1) x.batch_stride = x.rows * x.pitch;
    }
    // Zeros up to the next 16 bytes belong to a row that is aligned.
    const int64_t unit = 16 / bytes;
    for (int i : {0, 1}) {
      if ((i == 0 ? p.align_a : p.align_b) < 16) continue;
      operand[i].columns = (operand[i].columns + unit - 1) / unit * unit;
    }
  }
};

void encode(const mp_kernel& kernel, int operand, const Matrix& x, CUtensorMap* map) {
  // A map of type TFLOAT32 rounds fp32 operands to nearest while it loads; the tensor core
  // truncates.
  const bool tf32 = kernel.precision == MP_TF32 && operand < 2;
  const int type = kernel.dtype == MP_F16    ? CU_TENSOR_MAP_FLOAT16
                   : kernel.dtype == MP_BF16 ? CU_TENSOR_MAP_BFLOAT16
                   : tf32                    ? CU_TENSOR_MAP_TFLOAT32
                                             : CU_TENSOR_MAP_FLOAT32;
  const mp_desc_shape& shape = kernel.desc[operand];
  const uint64_t bytes = element_bytes(kernel.dtype);
  // The driver counts axes from the innermost.
  const uint64_t dims[3] = {uint64_t(x.columns), uint64_t(x.rows), uint64_t(x.entries)};
  const uint64_t strides[2] = {x.pitch * bytes, x.batch_stride * bytes};
  const uint32_t box[3] = {uint32_t(shape.box[2]), uint32_t(shape.box[1]), uint32_t(shape.box[0])};
  const uint32_t steps[3] = {1, 1, 1};
  const auto& encode_tiled = driver().TensorMapEncodeTiled;
  if (!encode_tiled) {
    fail(MP_NO_DRIVER,
         "the CUDA driver has no cuTensorMapEncodeTiled; install one for CUDA 12 or later");
  }
  const CUresult result = encode_tiled(map, type, 3, const_cast<char*>(x.base), dims, strides, box,
                                       steps, 0, shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_128B, 0);
  if (result) {
    std::ostringstream what;
    what << "cuTensorMapEncodeTiled for operand " << "ABY"[operand] << " of " << kernel.name
         << " (address " << static_cast<const void*>(x.base) << ", " << x.entries << " x " << x.rows
         << " x " << x.columns << ", strides " << x.batch_stride << " and " << x.pitch
         << " elements)";
    check(result, what.str().c_str());
  }
}

// The argument array of one launch, on the stack.
class Arguments {
 public:
  void** data() { return pointers_; }
  CUtensorMap* map(int operand) {
    pointers_[count_++] = &maps_[operand];
    return &maps_[operand];
  }
  void i32(int64_t value) { scalar().i32 = static_cast<int32_t>(value); }
  void i64(int64_t value) { scalar().i64 = value; }
  void f32(float value) { scalar().f32 = value; }
  void pointer(const void* value) { scalar().pointer = value; }

 private:
  union Scalar {
    int32_t i32;
    int64_t i64;
    float f32;
    const void* pointer;
  };
  Scalar& scalar() {
    Scalar& value = scalars_[count_];
    pointers_[count_++] = &value;
    return value;
  }
  CUtensorMap maps_[3];
  Scalar scalars_[kMaxArguments];
  void* pointers_[kMaxArguments];
  int count_ = 0;
};

CUresult enqueue(CUfunction function, const mp_kernel& k, unsigned grid, bool is_early,
                 CUstream stream, void** arguments) {
  const Driver& api = driver();
  const unsigned threads = 32 * k.warps;
  if (!is_early || !api.LaunchKernelEx) {
    return api.LaunchKernel(function, grid, 1, 1, threads, 1, 1, k.shared_bytes, stream, arguments,
                            nullptr);
  }
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.allowed = 1;
  const CUlaunchConfig config{
      grid, 1, 1, threads, 1, 1, static_cast<unsigned>(k.shared_bytes), stream, &early, 1};
  return api.LaunchKernelEx(&config, function, arguments, nullptr);
}

// A null base (nothing is needed there) stays null.
template <typename T>
const T* moved(const void* base, int64_t offset) {
  return base ? static_cast<const T*>(base) + offset : nullptr;
}

}  // namespace

std::shared_ptr<Launcher> Launcher::get(std::shared_ptr<const Pack> pack, int ordinal) {
  static std::mutex mutex;
  static auto& launchers = *new std::map<std::pair<const Pack*, int>, std::weak_ptr<Launcher>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& slot = launchers[{pack.get(), ordinal}];
  std::shared_ptr<Launcher> launcher = slot.lock();
  if (!launcher) {
    launcher.reset(new Launcher(std::move(pack), ordinal));
    slot = launcher;
  }
  return launcher;
}

Launcher::Launcher(std::shared_ptr<const Pack> pack, int ordinal)
    : pack_(std::move(pack)),
      ordinal_(ordinal),
      context_(ordinal),
      modules_(pack_->kernel_count()),
      functions_(pack_->kernel_count()) {
  if (pack_->is_catalog()) {
    fail(MP_BAD_PACK, "kernel pack '", pack_->path(),
         "' is a catalog without code: it plans but cannot launch; build a pack with `moonpoly "
         "pack`");
  }
  mp_device device;
  query_device(ordinal, &device);
  sm_count_ = device.sm_count;
  CurrentContext current(context_.get());
  const size_t count = kSlots * kCountersPerSlot;
  check(driver().MemAlloc(&counters_, count * sizeof(int32_t)), "cuMemAlloc of counters");
  CUresult cleared = driver().MemsetD32(counters_, 0, count);
  // That returns before it is done, on the null stream, for which ONNX Runtime's streams do not
  // wait; it may be queued there behind any work of the program.
  if (!cleared) cleared = driver().StreamSynchronize(nullptr);
  if (cleared) driver().MemFree(counters_);
  check(cleared, "cuMemsetD32 of counters");
}

Launcher::~Launcher() {
  // At process exit the driver may be gone before us; its refusals then mean nothing.
  const Driver& api = driver();
  CUcontext popped;
  if (api.CtxPushCurrent(context_.get()) != 0) {
    vendor_.release();  // cuBLASLt has no device to give its handle back to
    return;
  }
  vendor_.reset();
  for (CUmodule module : modules_) {
    if (module) api.ModuleUnload(module);
  }
  api.MemFree(counters_);
  api.CtxPopCurrent(&popped);
}

void Launcher::load_kernel(int index) {
  const mp_kernel& k = pack_->kernel(index);
  const auto named = [&](const char* call) {
    return std::string(call) + " of kernel " + k.name + " from '" + pack_->path() + "' on GPU " +
           std::to_string(ordinal_);
  };
  const Driver& api = driver();
  if (!modules_[index]) {  // else of an attempt that failed further on
    check(api.ModuleLoadData(&modules_[index], pack_->cubin(k)), named("cuModuleLoadData").c_str());
  }
  CUfunction function = nullptr;
  check(api.ModuleGetFunction(&function, modules_[index], k.entry),
        named("cuModuleGetFunction").c_str());
  if (k.shared_bytes > 0) {
    check(api.FuncSetAttribute(function, CU_FUNC_MAX_DYNAMIC_SHARED, k.shared_bytes),
          named("cuFuncSetAttribute").c_str());
  }
  if (api.FuncLoad) check(api.FuncLoad(function), named("cuFuncLoad").c_str());
  functions_[index] = function;
}

void Launcher::load(int dtype, int precision) {
  auto& loaded = loaded_[dtype * 2 + precision];
  if (loaded.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(load_mutex_);
  if (loaded.load(std::memory_order_relaxed)) return;

  // Kernels that the device cannot hold are never planned; loading them would be refused.
  mp_device device;
  query_device(ordinal_, &device);
  std::vector<int> wanted;
  for (int i = 0; i < pack_->kernel_count(); ++i) {
    const mp_kernel& k = pack_->kernel(i);
    if (computes_in(k, dtype, precision) && !functions_[i] &&
        k.shared_bytes <= device.shared_per_block) {
      wanted.push_back(i);
    }
  }
  std::atomic<size_t> next{0};
  std::mutex failure_mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      CurrentContext current(context_.get());
      for (size_t i; (i = next++) < wanted.size();) load_kernel(wanted[i]);
    } catch (...) {
      next = wanted.size();
      std::lock_guard<std::mutex> guard(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const size_t helpers =
      std::min<size_t>({3, wanted.size() / 16, std::thread::hardware_concurrency()});
  std::vector<std::thread> threads;
  threads.reserve(helpers);
  try {
    for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // No thread is to be had here: those that started and this one load everything.
  }
  work();
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  loaded.store(true, std::memory_order_release);
}

void Launcher::load_vendor() {
  if (vendor_loaded_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(load_mutex_);
  if (vendor_) return;
  CurrentContext current(context_.get());
  vendor_ = std::make_unique<Vendor>();
  vendor_loaded_.store(true, std::memory_order_release);
}

int64_t Launcher::vendor_workspace(const mp_problem& p, const mp_plan& plan,
                                   const Operands& operands) {
  int64_t most = 0;
  for (int i = 0; i < plan.region_count; ++i) {
    const mp_region& r = plan.regions[i];
    const int64_t bytes =
        r.kernel == MP_VENDOR ? vendor_->workspace_bytes(p, r, operands) : r.workspace_bytes;
    if (bytes < 0) return -1;
    most = std::max(most, bytes);
  }
  return most;
}

void Launcher::copy(const mp_problem& p, const mp_copy& copy, int operand, const void* source,
                    void* target, CUstream stream) {
  const CopyLaunch launch = launch_of(p, copy, operand);
  launch_regions(launch.problem, &launch.region, 1, {source, nullptr, nullptr, target}, nullptr,
                 nullptr, stream);
}

std::unique_lock<std::mutex> Launcher::turn_of(const void* counters) {
  const CUdeviceptr bytes = kCountersPerSlot * sizeof(int32_t);
  const CUdeviceptr slot = (reinterpret_cast<CUdeviceptr>(counters) - counters_) / bytes;
  if (!counters || slot >= kSlots) return {};
  return std::unique_lock<std::mutex>(slots_[slot].turn);
}

void Launcher::launch(const mp_problem& p, const mp_plan& plan, const Operands& operands,
                      void* workspace, void* counters, CUstream stream) {
  const auto turn = turn_of(counters);
  if (!has_copies(plan)) {
    launch_regions(p, plan.regions, plan.region_count, operands, workspace, counters, stream);
    return;
  }
  Operands moved = operands;
  const void** const sources[] = {&moved.a, &moved.b};
  for (int operand : {0, 1}) {
    if (plan.copies[operand].bytes == 0) continue;
    void* target = static_cast<char*>(workspace) + plan.copies[operand].offset;
    copy(p, plan.copies[operand], operand, *sources[operand], target, stream);
    *sources[operand] = target;
  }
  launch_regions(copied(p, plan), plan.regions, plan.region_count, moved, workspace, counters,
                 stream);
}

void Launcher::launch_regions(const mp_problem& p, const mp_region* regions, int count,
                              const Operands& operands, void* workspace, void* counters,
                              CUstream stream) {
  for (int i = 0; i < count; ++i) {
    const mp_region& r = regions[i];
    if (r.kernel == MP_VENDOR) {
      vendor_->launch(p, r, operands, const_cast<char*>(moved<char>(workspace, r.workspace_offset)),
                      stream);
      continue;
    }
    const mp_kernel& k = pack_->kernel(r.kernel);
    if (!functions_[r.kernel])
      fail(MP_NO_KERNEL, "kernel ", k.name, " does not fit GPU ", ordinal_);
    const mp_order order = order_of(*pack_, regions, count, i);
    const Views views(p, r, operands);
    Arguments args;
    const int32_t* params = pack_->params(k);
    for (int j = 0; j < k.param_count; ++j) {
      switch (params[j]) {
        case MP_P_DESC_A:
        case MP_P_DESC_B:
        case MP_P_DESC_Y: {
          const int which = params[j] - MP_P_DESC_A;
          const Matrix& x = views.operand[which];
          map_of(r.kernel, which, x, args.map(which));
          for (int axis = 0; axis < 3; ++axis) args.i32(x.sizes(axis));
          for (int axis = 0; axis < 3; ++axis) args.i64(x.strides(axis));
          break;
        }
        case MP_P_PTR_A:
          args.pointer(views.operand[0].base);
          break;
        case MP_P_PTR_B:
          args.pointer(views.operand[1].base);
          break;
        case MP_P_PTR_Y:
          args.pointer(views.operand[2].base);
          break;
        case MP_P_PTR_BIAS:
          args.pointer(views.bias);
          break;
        case MP_P_PTR_WORKSPACE:
          args.pointer(moved<char>(workspace, r.workspace_offset));
          break;
        case MP_P_PTR_COUNTERS:
          args.pointer(moved<int32_t>(counters, r.counters_offset));
          break;
        case MP_P_M:
          args.i32(r.m);
          break;
        case MP_P_N:
          args.i32(r.n);
          break;
        case MP_P_K:
          args.i32(p.k);
          break;
        case MP_P_SPLIT:
          args.i32(r.split);
          break;
        case MP_P_A_DIV:
          args.i32(p.a_div);
          break;
        case MP_P_A_MOD:
          args.i32(p.a_mod);
          break;
        case MP_P_B_DIV:
          args.i32(p.b_div);
          break;
        case MP_P_B_MOD:
          args.i32(p.b_mod);
          break;
        case MP_P_Z0:
          args.i32(r.z0);
          break;
        case MP_P_LDA:
          args.i64(p.lda);
          break;
        case MP_P_LDB:
          args.i64(p.ldb);
          break;
        case MP_P_LDC:
          args.i64(p.ldc);
          break;
        case MP_P_A_BATCH:
          args.i64(p.a_batch_stride);
          break;
        case MP_P_B_BATCH:
          args.i64(p.b_batch_stride);
          break;
        case MP_P_C_BATCH:
          args.i64(p.c_batch_stride);
          break;
        case MP_P_BIAS_M:
          args.i64(p.bias_stride_m);
          break;
        case MP_P_BIAS_N:
          args.i64(p.bias_stride_n);
          break;
        case MP_P_ALPHA:
          args.f32(p.alpha);
          break;
        case MP_P_BETA:
          args.f32(operands.bias ? p.beta : 0.0f);
          break;
        case MP_P_PTR_RESIDUAL:
          args.pointer(views.residual);
          break;
        case MP_P_ACTIVATION:
          args.i32(epilogue_code(p));
          break;
        case MP_P_ACT_ALPHA:
          args.f32(p.act_alpha);
          break;
        case MP_P_ACT_BETA:
          args.f32(p.act_beta);
          break;
        case MP_P_BATCH:
          args.i32(r.z);
          break;
        case MP_P_ORDER:
          args.i32(order);
          break;
        case MP_P_NULL:
          args.pointer(nullptr);
          break;
      }
    }
    const int64_t steps = (p.k + int64_t{k.bk} * r.split - 1) / (int64_t{k.bk} * r.split);
    const bool is_early = is_launched_early(KernelTraits(k), sm_count_, r.grid, steps);
    const CUresult result = enqueue(functions_[r.kernel], k, static_cast<unsigned>(r.grid),
                                    is_early, stream, args.data());
    if (result) check(result, (std::string("cuLaunchKernel of ") + k.name).c_str());
    stats().launches.fetch_add(1, std::memory_order_relaxed);
  }
}

void Launcher::map_of(int kernel, int operand, const Matrix& matrix, CUtensorMap* out) {
  const TensorMaps::Key key{matrix, kernel, operand};
  if (maps_.find(key, out)) return;
  encode(pack_->kernel(kernel), operand, matrix, out);
  maps_.remember(key, *out);
}

void* Launcher::counters_for(CUstream stream, int64_t count) {
  if (count > kCountersPerSlot || stream == per_thread_stream()) return nullptr;
  int capturing = CU_STREAM_CAPTURE_NONE;
  check(driver().StreamIsCapturing(stream, &capturing), "cuStreamIsCapturing");
  if (capturing != CU_STREAM_CAPTURE_NONE) return nullptr;
  const auto memory = [&](int slot) {
    return reinterpret_cast<void*>(counters_ + slot * kCountersPerSlot * sizeof(int32_t));
  };
  for (int i = 0; i < kSlots && slots_[i].taken.load(std::memory_order_acquire); ++i) {
    if (slots_[i].stream.load(std::memory_order_relaxed) == stream) return memory(i);
  }
  std::lock_guard<std::mutex> lock(slot_mutex_);
  for (int i = 0; i < kSlots; ++i) {
    if (!slots_[i].taken.load(std::memory_order_relaxed)) {
      slots_[i].stream.store(stream, std::memory_order_relaxed);
      slots_[i].taken.store(true, std::memory_order_release);
      return memory(i);
    }
    if (slots_[i].stream.load(std::memory_order_relaxed) == stream) return memory(i);
  }
  return nullptr;
}

void Launcher::clear(void* counters, int64_t count, CUstream stream) {
  check(driver().MemsetD32Async(reinterpret_cast<CUdeviceptr>(counters), 0, count, stream),
        "cuMemsetD32Async of counters");
}

}  // namespace moonpoly
