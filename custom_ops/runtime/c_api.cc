// The flat C surface: turns exceptions into a status and a text.
#include <cstring>
#include <new>

#include "conv_planner.h"
#include "conv_shape.h"
#include "conv_weights.h"
#include "driver.h"
#include "error.h"
#include "interpreter.h"
#include "launcher.h"
#include "moonpoly.h"
#include "pack.h"
#include "packing.h"
#include "planner.h"
#include "regions.h"
#include "shape.h"
#include "stats.h"
#include "vendor.h"

#define MP_EXPORT extern "C" __attribute__((visibility("default")))

struct mp_pack {
  std::shared_ptr<const moonpoly::Pack> pack;
};
struct mp_launcher {
  std::shared_ptr<moonpoly::Launcher> launcher;
};

namespace {

thread_local std::string last_error;

template <typename Body>
mp_status guarded(Body body) {
  try {
    body();
    return MP_OK;
  } catch (const moonpoly::Error& e) {
    last_error = e.what();
    return e.status;
  } catch (const std::bad_alloc&) {
    last_error = "out of host memory";
  } catch (const std::exception& e) {
    last_error = e.what();
  }
  return MP_INTERNAL;
}

void require(const void* pointer, const char* name) {
  if (!pointer) moonpoly::fail(MP_INVALID, "argument `", name, "` is null");
}

moonpoly::Shape shape_of(int32_t rank, const int64_t* dims) {
  if (rank < 0 || rank > moonpoly::kMaxRank) {
    moonpoly::fail(MP_INVALID, "a rank is 0 to ", moonpoly::kMaxRank, ", not ", rank);
  }
  if (rank) require(dims, "dims");
  moonpoly::Shape shape;
  shape.rank = rank;
  for (int i = 0; i < rank; ++i) {
    if (dims[i] < 0) moonpoly::fail(MP_INVALID, "size ", dims[i], " of axis ", i, " is negative");
    shape.dims[i] = dims[i];
  }
  return shape;
}

// The same for a convolution's plan.
void check_conv_plan(const moonpoly::Pack& pack, const mp_conv& conv, const mp_plan& plan) {
  moonpoly::check_conv(conv);
  if (plan.region_count < 0 || plan.region_count > MP_MAX_REGIONS) {
    moonpoly::fail(MP_INVALID, "a plan has 0 to ", MP_MAX_REGIONS, " regions, not ",
                   plan.region_count);
  }
  for (int i = 0; i < plan.region_count; ++i) {
    const mp_region& r = plan.regions[i];
    if (r.kernel < 0 || r.kernel >= pack.kernel_count()) {
      moonpoly::fail(MP_INVALID, "region ", i, " names kernel ", r.kernel, "; the pack holds ",
                     pack.kernel_count());
    }
    const mp_kernel& k = pack.kernel(r.kernel);
    if (const char* why = moonpoly::conv_refusal(k, conv)) {
      moonpoly::fail(MP_NO_KERNEL, "region ", i, ": kernel ", k.name,
                     " cannot run this convolution: ", why);
    }
    const int64_t entries = moonpoly::conv_entries(k, conv);
    const int64_t pixels = moonpoly::out_pixels(conv);
    const int64_t columns = moonpoly::conv_images(k, conv) * pixels;
    if (r.m0 != 0 || r.m != moonpoly::conv_rows(k, conv) || r.n0 < 0 || r.n < 1 ||
        r.n0 % pixels != 0 || r.n % pixels != 0 || r.n > columns - r.n0 ||
        r.n > moonpoly::kMaxConvColumns || r.z0 < 0 || r.z < 1 || r.z > entries - r.z0 ||
        r.grid < 1 || r.grid > 0x7fffffff) {
      moonpoly::fail(MP_INVALID, "region ", i, " lies outside the convolution, or cuts an image");
    }
  }
}

// A plan may come from outside: check that the launcher cannot be led astray by it.
void check_plan(const moonpoly::Pack& pack, const mp_problem& given, const mp_plan& plan) {
  moonpoly::check_problem(given);
  moonpoly::check_copies(pack, given, plan);
  const mp_problem problem = moonpoly::copied(given, plan);
  if (plan.region_count < 0 || plan.region_count > MP_MAX_REGIONS) {
    moonpoly::fail(MP_INVALID, "a plan has 0 to ", MP_MAX_REGIONS, " regions, not ",
                   plan.region_count);
  }
  for (int i = 0; i < plan.region_count; ++i) {
    const mp_region& r = plan.regions[i];
    const bool vendor = r.kernel == MP_VENDOR;
    if (!vendor && (r.kernel < 0 || r.kernel >= pack.kernel_count())) {
      moonpoly::fail(MP_INVALID, "region ", i, " names kernel ", r.kernel, "; the pack holds ",
                     pack.kernel_count());
    }
    if (const char* why =
            vendor ? moonpoly::vendor_refusal(problem)
                   : moonpoly::refusal(moonpoly::KernelTraits(pack.kernel(r.kernel)), problem)) {
      moonpoly::fail(MP_NO_KERNEL, "region ", i, ": ",
                     vendor ? "cuBLASLt" : pack.kernel(r.kernel).name,
                     " cannot run this problem: ", why);
    }
    const auto within = [](int64_t first, int64_t count, int64_t size) {
      return first >= 0 && count > 0 && count <= size && first <= size - count;
    };
    if (!within(r.m0, r.m, problem.m) || !within(r.n0, r.n, problem.n) ||
        !within(r.z0, r.z, problem.batch) || r.grid < 1 || r.grid > 0x7fffffff) {
      moonpoly::fail(MP_INVALID, "region ", i, " lies outside the problem");
    }
    if (!vendor) moonpoly::check_launch(pack.kernel(r.kernel), problem, r, i);
  }
  moonpoly::check_regions(plan);
}

}  // namespace

MP_EXPORT int32_t mp_api_version(void) { return MP_API_VERSION; }

MP_EXPORT const char* mp_last_error(void) { return last_error.c_str(); }

MP_EXPORT int32_t mp_struct_size(const char* name) {
  if (!name) return -1;
#define MP_SIZE(type) \
  if (std::strcmp(name, #type) == 0) return sizeof(type)
  MP_SIZE(mp_problem);
  MP_SIZE(mp_device);
  MP_SIZE(mp_region);
  MP_SIZE(mp_copy);
  MP_SIZE(mp_plan);
  MP_SIZE(mp_desc_shape);
  MP_SIZE(mp_kernel);
  MP_SIZE(mp_cost);
  MP_SIZE(mp_table);
  MP_SIZE(mp_log_factors);
  MP_SIZE(mp_vendor_cost);
  MP_SIZE(mp_pack_header);
  MP_SIZE(mp_stats);
  MP_SIZE(mp_conv);
  MP_SIZE(mp_conv_attributes);
#undef MP_SIZE
  return -1;
}

MP_EXPORT mp_status mp_pack_open(const char* path, mp_pack** out) {
  return guarded([&] {
    require(path, "path");
    require(out, "out");
    *out = nullptr;
    *out = new mp_pack{moonpoly::Pack::open(path)};
  });
}

MP_EXPORT void mp_pack_close(mp_pack* pack) { delete pack; }

MP_EXPORT int32_t mp_pack_kernel_count(const mp_pack* pack) {
  return pack ? pack->pack->kernel_count() : 0;
}

MP_EXPORT const mp_kernel* mp_pack_kernel(const mp_pack* pack, int32_t index) {
  if (!pack || index < 0 || index >= pack->pack->kernel_count()) return nullptr;
  return &pack->pack->kernel(index);
}

MP_EXPORT const mp_pack_header* mp_pack_info(const mp_pack* pack) {
  return pack ? &pack->pack->header() : nullptr;
}

MP_EXPORT mp_status mp_device_count(int32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = moonpoly::device_count();
  });
}

MP_EXPORT int32_t mp_blocks_per_sm(const mp_kernel* kernel, const mp_device* device) {
  return kernel && device && kernel->warps > 0 ? moonpoly::blocks_per_sm(*kernel, *device) : 0;
}

MP_EXPORT mp_status mp_device_query(int32_t ordinal, mp_device* out) {
  return guarded([&] {
    require(out, "out");
    moonpoly::query_device(ordinal, out);
  });
}

MP_EXPORT mp_status mp_plan_problem(const mp_pack* pack, const mp_device* device,
                                    const mp_problem* problem, int32_t only_kernel,
                                    int32_t only_split, int32_t flags, mp_plan* out) {
  return guarded([&] {
    require(pack, "pack");
    require(device, "device");
    require(problem, "problem");
    require(out, "out");
    moonpoly::PlanRequest request;
    request.only_kernel = only_kernel;
    request.only_split = only_split;
    constexpr int32_t known =
        MP_PLAN_NO_SPLIT | MP_PLAN_NO_REGIONS | MP_PLAN_NO_VENDOR | MP_PLAN_NO_STREAM;
    if (flags & ~known) {
      moonpoly::fail(MP_INVALID, "plan flags ", flags, " are unknown; mp_plan_flags add up to ",
                     known);
    }
    request.flags = flags;
    pack->pack->planner(*device)->plan(*problem, request, out);
  });
}

MP_EXPORT mp_status mp_launcher_create(const mp_pack* pack, int32_t ordinal, mp_launcher** out) {
  return guarded([&] {
    require(pack, "pack");
    require(out, "out");
    *out = nullptr;
    mp_device device;
    moonpoly::query_device(ordinal, &device);
    pack->pack->planner(device);  // refuses a pack for another architecture
    *out = new mp_launcher{moonpoly::Launcher::get(pack->pack, ordinal)};
  });
}

MP_EXPORT void mp_launcher_destroy(mp_launcher* launcher) { delete launcher; }

MP_EXPORT mp_status mp_launch(mp_launcher* launcher, const mp_problem* problem, const mp_plan* plan,
                              const void* a, const void* b, const void* bias, const void* residual,
                              void* y, void* workspace, void* counters, void* stream) {
  return guarded([&] {
    require(launcher, "launcher");
    require(problem, "problem");
    require(plan, "plan");
    moonpoly::Launcher& device = *launcher->launcher;
    check_plan(device.pack(), *problem, *plan);
    if ((plan->workspace_bytes && !workspace) || (plan->counters && !counters)) {
      moonpoly::fail(MP_INVALID, "the plan needs ", plan->workspace_bytes,
                     " bytes of workspace and ", plan->counters, " zeroed counters; got null");
    }
    if (plan->workspace_bytes && reinterpret_cast<uintptr_t>(workspace) % 16) {
      moonpoly::fail(MP_INVALID, "the workspace at ", workspace, " is not 16-byte aligned");
    }
    if (problem->bias != MP_BIAS_NONE && !bias) {
      moonpoly::fail(MP_INVALID, "the problem has a bias, but `bias` is null");
    }
    if (problem->residual && !residual) {
      moonpoly::fail(MP_INVALID, "the problem has a residual, but `residual` is null");
    }
    moonpoly::CurrentContext current(device.context());
    if (moonpoly::uses_vendor(*plan)) device.load_vendor();
    device.load(problem->dtype, problem->dtype == MP_F32 ? problem->precision : MP_TF32);
    const moonpoly::Operands operands{a, b, problem->bias ? bias : nullptr, y,
                                      problem->residual ? residual : nullptr};
    device.launch(*problem, *plan, operands, workspace, counters,
                  static_cast<moonpoly::CUstream>(stream));
  });
}

MP_EXPORT mp_status mp_repacked_problem(const mp_pack* pack, const mp_problem* problem,
                                        mp_problem* out, int64_t* bytes) {
  return guarded([&] {
    require(pack, "pack");
    require(problem, "problem");
    require(out, "out");
    require(bytes, "bytes");
    moonpoly::check_problem(*problem);
    const mp_copy copy = moonpoly::repacked(*pack->pack, *problem);
    *out = *problem;
    *bytes = copy.bytes;
    moonpoly::substitute(copy, 1, out);
  });
}

MP_EXPORT mp_status mp_repack(mp_launcher* launcher, const mp_problem* problem, const void* b,
                              void* packed, void* stream) {
  return guarded([&] {
    require(launcher, "launcher");
    require(problem, "problem");
    require(b, "b");
    require(packed, "packed");
    moonpoly::check_problem(*problem);
    moonpoly::Launcher& device = *launcher->launcher;
    const mp_copy copy = moonpoly::repacked(device.pack(), *problem);
    if (copy.bytes == 0) {
      moonpoly::fail(MP_INVALID,
                     "B of this problem is used as it is stored; mp_repacked_problem "
                     "says 0 bytes");
    }
    if (reinterpret_cast<uintptr_t>(packed) % 16) {
      moonpoly::fail(MP_INVALID, "the copy at ", packed, " is not 16-byte aligned");
    }
    moonpoly::CurrentContext current(device.context());
    device.load(problem->dtype, problem->dtype == MP_F32 ? problem->precision : MP_TF32);
    device.copy(*problem, copy, 1, b, packed, static_cast<moonpoly::CUstream>(stream));
  });
}

MP_EXPORT void mp_set_interpreter(mp_interpret_fn fn) { moonpoly::interpreter().store(fn); }

MP_EXPORT void mp_get_stats(mp_stats* out) {
  if (!out) return;
  const moonpoly::Stats& s = moonpoly::stats();
  out->plan_hits = s.plan_hits.load(std::memory_order_relaxed);
  out->plan_misses = s.plan_misses.load(std::memory_order_relaxed);
  out->launches = s.launches.load(std::memory_order_relaxed);
  out->plan_miss_us_total = s.plan_miss_ns_total.load(std::memory_order_relaxed) * 1e-3;
  out->plan_miss_us_max = s.plan_miss_ns_max.load(std::memory_order_relaxed) * 1e-3;
}

MP_EXPORT mp_status mp_matmul_problem(int32_t dtype, int32_t precision, int32_t a_rank,
                                      const int64_t* a_dims, int32_t b_rank, const int64_t* b_dims,
                                      int32_t trans_b, mp_problem* out, int64_t* launches) {
  return guarded([&] {
    require(out, "out");
    require(launches, "launches");
    moonpoly::Product product;
    moonpoly::matmul_product(shape_of(a_rank, a_dims), shape_of(b_rank, b_dims), trans_b != 0,
                             {dtype, precision}, &product);
    moonpoly::set_alignment(&product, nullptr, nullptr, nullptr);
    *out = product.problem;
    *launches = 1;
    for (int i = 0; i < product.loop_count; ++i) *launches *= product.loops[i].count;
  });
}

MP_EXPORT mp_status mp_gemm_problem(int32_t dtype, int32_t precision, const int64_t* a_dims,
                                    const int64_t* b_dims, int32_t c_rank, const int64_t* c_dims,
                                    int32_t trans_a, int32_t trans_b, float alpha, float beta,
                                    mp_problem* out) {
  return guarded([&] {
    require(out, "out");
    const moonpoly::Shape c = c_dims ? shape_of(c_rank, c_dims) : moonpoly::Shape{};
    moonpoly::Product product;
    moonpoly::gemm_product(shape_of(2, a_dims), shape_of(2, b_dims), c_dims ? &c : nullptr,
                           {trans_a != 0, trans_b != 0, alpha, beta}, {dtype, precision}, &product);
    moonpoly::set_alignment(&product, nullptr, nullptr, nullptr);
    *out = product.problem;
  });
}

MP_EXPORT mp_status mp_conv_problem(int32_t dtype, int32_t precision,
                                    const mp_conv_attributes* attributes, int32_t x_rank,
                                    const int64_t* x_dims, int32_t w_rank, const int64_t* w_dims,
                                    int32_t bias, int64_t* out_dims, mp_conv* conv,
                                    mp_problem* problem, int32_t* pointwise, int32_t* w_is_a) {
  return guarded([&] {
    require(attributes, "attributes");
    require(out_dims, "out_dims");
    require(conv, "conv");
    require(problem, "problem");
    require(pointwise, "pointwise");
    require(w_is_a, "w_is_a");
    const moonpoly::Shape x = shape_of(x_rank, x_dims), w = shape_of(w_rank, w_dims);
    moonpoly::Shape b;
    b.rank = 1;
    if (w.rank > 1) b.dims[0] = attributes->transposed ? w.dims[1] * attributes->group : w.dims[0];
    moonpoly::Convolution found;
    moonpoly::convolution(x, w, bias ? &b : nullptr, *attributes, {dtype, precision}, &found);
    for (int i = 0; i < found.output.rank; ++i) out_dims[i] = found.output.dims[i];
    *conv = found.conv;
    *problem = mp_problem{};
    *pointwise = found.pointwise;
    *w_is_a = found.pointwise && found.w_is_a;
    if (found.pointwise) {
      moonpoly::set_alignment(&found.product, nullptr, nullptr, nullptr);
      *problem = found.product.problem;
    }
  });
}

MP_EXPORT mp_status mp_conv_packed(const mp_conv* conv, mp_conv* out, int64_t* bytes) {
  return guarded([&] {
    require(conv, "conv");
    require(out, "out");
    require(bytes, "bytes");
    moonpoly::check_conv(*conv);
    *bytes = moonpoly::packed_conv(*conv, out);
  });
}

MP_EXPORT mp_status mp_conv_pack(const mp_conv* conv, const void* w, void* packed) {
  return guarded([&] {
    require(conv, "conv");
    require(w, "w");
    require(packed, "packed");
    moonpoly::check_conv(*conv);
    moonpoly::pack_conv(*conv, w, packed);
  });
}

MP_EXPORT mp_status mp_plan_conv(const mp_pack* pack, const mp_device* device, const mp_conv* conv,
                                 int32_t only_kernel, int32_t only_split, int32_t flags,
                                 mp_plan* out) {
  return guarded([&] {
    require(pack, "pack");
    require(device, "device");
    require(conv, "conv");
    require(out, "out");
    moonpoly::PlanRequest request;
    request.only_kernel = only_kernel;
    request.only_split = only_split;
    request.workspace = !(flags & 1);  // MP_PLAN_NO_SPLIT
    pack->pack->conv_planner(*device)->plan(*conv, request, out);
  });
}

MP_EXPORT mp_status mp_launch_conv(mp_launcher* launcher, const mp_conv* conv, const mp_plan* plan,
                                   const void* x, const void* w, const void* bias,
                                   const void* residual, void* y, void* workspace, void* counters,
                                   void* stream) {
  return guarded([&] {
    require(launcher, "launcher");
    require(conv, "conv");
    require(plan, "plan");
    moonpoly::Launcher& device = *launcher->launcher;
    check_conv_plan(device.pack(), *conv, *plan);
    if ((plan->workspace_bytes && !workspace) || (plan->counters && !counters)) {
      moonpoly::fail(MP_INVALID, "the plan needs ", plan->workspace_bytes,
                     " bytes of workspace and ", plan->counters, " zeroed counters; got null");
    }
    if (plan->workspace_bytes && reinterpret_cast<uintptr_t>(workspace) % 16) {
      moonpoly::fail(MP_INVALID, "the workspace at ", workspace, " is not 16-byte aligned");
    }
    if (conv->w_taps && reinterpret_cast<uintptr_t>(w) % 16) {
      moonpoly::fail(MP_INVALID, "W at ", w, " is not 16-byte aligned, as w_taps = ", conv->w_taps,
                     " says");
    }
    if (conv->bias && !bias) {
      moonpoly::fail(MP_INVALID, "the convolution has a bias, but `bias` is null");
    }
    if (conv->residual && !residual) {
      moonpoly::fail(MP_INVALID, "the convolution has a residual, but `residual` is null");
    }
    moonpoly::CurrentContext current(device.context());
    device.load(conv->dtype, conv->dtype == MP_F32 ? conv->precision : MP_TF32);
    const moonpoly::Operands operands{w, x, conv->bias ? bias : nullptr, y,
                                      conv->residual ? residual : nullptr};
    device.launch_conv(*conv, *plan, operands, workspace, counters,
                       static_cast<moonpoly::CUstream>(stream));
  });
}

MP_EXPORT void mp_set_conv_interpreter(mp_interpret_conv_fn fn) {
  moonpoly::conv_interpreter().store(fn);
}
