#include "packing.h"

#include <algorithm>
#include <cstring>

#include "cost_model.h"
#include "error.h"
#include "pack.h"
#include "planner.h"

namespace moonpoly {
namespace {

constexpr int64_t kUnit = 16;                            // bytes
constexpr int64_t kMaxCopyBytes = int64_t{1} << 30;      // of scratch memory
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1024;  // of one region
constexpr double kCopyLatencyUs = 1.2;     // from the first load to the last store, launch aside
constexpr double kNarrowLoadClocks = 4.5;  // per warp and load of an element a lane

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is copied: `entries` matrices of `rows` by K.
struct Source {
  int64_t rows, entries, pitch, batch_stride;
  bool transposed;  // stored as K rows
};

Source source_of(const mp_problem& p, int operand) {
  const auto entries = [&](int32_t div, int32_t mod) {
    return std::min<int64_t>(mod, ceil_div(p.batch, div));
  };
  if (operand == 0) {
    return {p.m, entries(p.a_div, p.a_mod), p.lda, p.a_batch_stride, p.trans_a != 0};
  }
  return {p.n, entries(p.b_div, p.b_mod), p.ldb, p.b_batch_stride, p.trans_b == 0};
}

// Rows of B that end within a line of 128 bytes make TMA fetch a line more each: a step of a
// 128x128 tile takes 1.3 times as long at N = 1000 on an H200. Rows along K have no such ends.
bool crosses_lines(const Pack& pack, const mp_problem& p) {
  const int64_t size = element_bytes(p.dtype);
  return pack.header().sm == 90 && size == 2 && !p.trans_b && p.n >= 64 &&
         p.ldb * size % kLineBytes != 0 && p.k * size % kLineBytes == 0;
}

}  // namespace

mp_copy copy_of(const Pack& pack, const mp_problem& p, int operand) {
  mp_copy copy{};
  const Source source = source_of(p, operand);
  const int64_t size = element_bytes(p.dtype);
  copy.pitch = ceil_div(p.k * size, kUnit) * kUnit / size;
  int64_t bytes;
  if (p.k == 0 || source.rows > kMaxRows ||
      __builtin_mul_overflow(source.rows, copy.pitch, &copy.batch_stride) ||
      __builtin_mul_overflow(copy.batch_stride, source.entries * size, &bytes) ||
      bytes > kMaxCopyBytes) {
    return mp_copy{};
  }
  const int precision = p.dtype == MP_F32 ? p.precision : MP_TF32;
  for (int index : pack.kernels_of(p.dtype, precision, source.transposed, !source.transposed)) {
    const mp_kernel& k = pack.kernel(index);
    if (k.family != MP_COPY_PADDED) continue;
    copy.kernel = index;
    copy.transposed = source.transposed;
    copy.bytes = bytes;
    copy.grid = source.entries * ceil_div(source.rows, k.bm) * ceil_div(copy.pitch, k.bn);
    if (copy.grid > 0x7fffffff) return mp_copy{};
    return copy;
  }
  return mp_copy{};
}

CopyLaunch launch_of(const mp_problem& p, const mp_copy& copy, int operand) {
  const Source source = source_of(p, operand);
  CopyLaunch launch{};
  mp_problem& q = launch.problem;
  q.dtype = p.dtype;
  q.precision = p.precision;
  q.trans_a = copy.transposed;
  q.trans_b = !copy.transposed;
  q.m = source.rows;
  q.n = copy.pitch;
  q.k = p.k;
  q.batch = q.a_mod = static_cast<int32_t>(source.entries);
  q.a_div = q.b_div = q.b_mod = 1;
  q.lda = source.pitch;
  q.ldc = copy.pitch;
  q.a_batch_stride = source.batch_stride;
  q.c_batch_stride = copy.batch_stride;
  q.alpha = 1;
  mp_region& r = launch.region;
  r.kernel = copy.kernel;
  r.split = 1;
  r.m = q.m;
  r.n = q.n;
  r.z = q.batch;
  r.grid = copy.grid;
  return launch;
}

void substitute(const mp_copy& copy, int operand, mp_problem* p) {
  if (copy.bytes == 0) return;
  if (operand == 0) {
    p->trans_a = 0;
    p->lda = copy.pitch;
    p->a_batch_stride = copy.batch_stride;
    p->align_a = kUnit;
  } else {
    p->trans_b = 1;
    p->ldb = copy.pitch;
    p->b_batch_stride = copy.batch_stride;
    p->align_b = kUnit;
  }
}

mp_problem copied(const mp_problem& problem, const mp_plan& plan) {
  mp_problem p = problem;
  for (int operand : {0, 1}) substitute(plan.copies[operand], operand, &p);
  return p;
}

bool gains_from_copy(const Pack& pack, const mp_problem& p, int operand) {
  // IEEE fp32 is bound by its arithmetic, and its kernels are fastest where B does not lie along K:
  // NN as fast as cuBLAS, NT 0.56 of it.
  if (p.dtype == MP_F32 && p.precision == MP_IEEE) return false;
  if ((operand == 0 ? p.align_a : p.align_b) < kUnit) return true;
  // wgmma reads TF32 factors from shared memory along K only.
  return operand == 1 && pack.header().sm == 90 && p.dtype == MP_F32 && p.precision == MP_TF32 &&
         !p.trans_b && p.n > 1;
}

mp_copy repacked(const Pack& pack, const mp_problem& p) {
  const bool one = p.b_mod == 1 && p.n > 1;
  const bool gains = gains_from_copy(pack, p, 1) || crosses_lines(pack, p);
  return one && gains ? copy_of(pack, p, 1) : mp_copy{};
}

void check_copies(const Pack& pack, const mp_problem& p, const mp_plan& plan) {
  for (int operand : {0, 1}) {
    const mp_copy& copy = plan.copies[operand];
    if (copy.bytes == 0) continue;
    mp_copy right = copy_of(pack, p, operand);
    right.offset = copy.offset;
    if (std::memcmp(&right, &copy, sizeof copy) != 0 || copy.offset < 0 || copy.offset % kUnit ||
        copy.offset > plan.workspace_bytes - copy.bytes) {
      fail(MP_INVALID, "the plan's copy of ", "AB"[operand],
           " does not fit the problem or its workspace of ", plan.workspace_bytes, " bytes");
    }
  }
}

bool is_copy(const Pack& pack, int kernel, const mp_problem& p) {
  if (kernel < 0 || kernel >= pack.kernel_count()) return false;
  const mp_kernel& k = pack.kernel(kernel);
  if (k.family != MP_COPY_PADDED) return false;
  if (k.dtype != p.dtype || (k.dtype == MP_F32 && k.precision != p.precision) ||
      k.trans_a != p.trans_a || k.trans_b != p.trans_b) {
    fail(MP_NO_KERNEL, "kernel ", k.name, " cannot copy the operands of this problem: it is for ",
         "another dtype, precision or layout");
  }
  return true;
}

double copy_us(const mp_problem& p, const mp_copy& copy, int operand, const mp_kernel& kernel,
               const DeviceModel& model) {
  const Source source = source_of(p, operand);
  const double read = double(source.entries) * source.rows * p.k * element_bytes(p.dtype);
  const double traffic = (read + copy.bytes) / model.bytes_per_us;
  // Rows shorter than a tile leave lanes idle that are issued all the same.
  const double issue = double(copy.grid) * kernel.bm * kernel.bn / 32 * kNarrowLoadClocks /
                       (model.sm_count * model.clocks_per_us);
  return model.launch_us + kCopyLatencyUs + std::max(traffic, issue);
}

bool Planner::usable(const mp_copy& copy) const { return costs_[copy.kernel].legal; }

// Weighs copies of the operands against the plan at hand, which has none. One more search at most,
// since a kernel that is worth a copy wants both operands aligned.
void Planner::consider_copies(const mp_problem& p, const PlanRequest& request, bool forced,
                              mp_plan* out) const {
  if (!request.workspace || p.m > kMaxRows || p.n > kMaxRows) return;
  mp_plan plan{};
  double us = 0;
  for (int operand : {0, 1}) {
    if (!forced && !gains_from_copy(pack_, p, operand)) continue;
    mp_copy& copy = plan.copies[operand];
    copy = copy_of(pack_, p, operand);
    if (copy.bytes == 0) {
      if (forced) fail(MP_NO_KERNEL, "the operands are too large for a copy, or K is 0");
      return;
    }
    if (!usable(copy)) {
      const char* name = pack_.kernel(copy.kernel).name;
      if (forced) fail(MP_NO_KERNEL, "kernel ", name, " is excluded on ", device_.name);
      return;
    }
    us += copy_us(p, copy, operand, pack_.kernel(copy.kernel), model_);
  }
  if (!has_copies(plan) || (!forced && us + model_.launch_us >= out->predicted_us)) return;
  const mp_problem q = copied(p, plan);
  mp_region area{};
  area.m = q.m;
  area.n = q.n;
  area.z = q.batch;
  const Extent extent = extent_of(q, area);
  const auto takes = [&](int index) {
    const KernelCost& cost = costs_[index];
    if (!cost.legal || refusal(cost.kernel, q)) return false;
    Choice choice;
    consider(index, extent, Tiling(cost.kernel, extent), request, &choice);
    return choice.kernel >= 0;  // else it cannot cut K as it is asked to
  };
  const auto& kernels =
      pack_.kernels_of(q.dtype, q.dtype == MP_F32 ? q.precision : MP_TF32, q.trans_a, q.trans_b);
  if (std::none_of(kernels.begin(), kernels.end(), takes)) return;
  cover(q, area, request, &plan);
  plan.predicted_us += us;
  if (!forced && plan.predicted_us >= out->predicted_us) return;
  for (mp_copy& copy : plan.copies) {
    if (copy.bytes == 0) continue;
    copy.offset = ceil_div(plan.workspace_bytes, 256) * 256;
    plan.workspace_bytes = copy.offset + copy.bytes;
  }
  *out = plan;
}

}  // namespace moonpoly
