#include "shape.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "error.h"
#include "pack.h"

namespace moonpoly {
namespace {

constexpr int64_t kMaxBatch = (int64_t{1} << 31) - 512;
constexpr int kWidest = 16;  // bytes: no access gains from more alignment

// Batch axes that broadcast alike, merged.
struct Group {
  int64_t size;
  bool in_a, in_b;
};

int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    fail(MP_INVALID, "a tensor of ", a, " x ", b, " elements is too large");
  }
  return product;
}

// (z / div) % mod for an operand that spans the inner group, the outer one, both or none.
void batch_map(bool in_inner, bool in_outer, int64_t inner, int64_t outer, int32_t* div,
               int32_t* mod) {
  *div = !in_inner && in_outer ? static_cast<int32_t>(inner) : 1;
  *mod = static_cast<int32_t>((in_inner ? inner : 1) * (in_outer ? outer : 1));
}

int64_t round_up_pitch(int64_t columns, int32_t dtype) {
  const int64_t unit = kWidest / element_bytes(dtype);
  return std::max<int64_t>(1, (columns + unit - 1) / unit) * unit;
}

// Contiguous operands with no batch.
void fill_plain(int64_t m, int64_t n, int64_t k, Element element, mp_problem* p) {
  *p = mp_problem{};
  p->dtype = element.dtype;
  p->precision = element.dtype == MP_F32 ? element.precision : MP_TF32;
  p->m = m;
  p->n = n;
  p->k = k;
  p->batch = 1;
  p->lda = p->trans_a ? m : k;
  p->ldb = p->trans_b ? k : n;
  p->ldc = n;
  p->a_batch_stride = multiply(m, k);
  p->b_batch_stride = multiply(k, n);
  p->c_batch_stride = multiply(m, n);
  p->a_div = p->a_mod = p->b_div = p->b_mod = 1;
  p->alpha = 1;
}

// Rewrites products with a single row or column so that no operand has rows of one element: those
// could be neither loaded widely nor through TMA. A pitch that is never used becomes an aligned
// one.
void make_canonical(Product* product) {
  mp_problem& p = product->problem;
  product->swapped = p.n == 1 && p.m > 1;
  if (product->swapped) {  // Y^T = op(B)^T op(A)^T: one row of M
    std::swap(p.m, p.n);
    std::swap(p.lda, p.ldb);
    std::swap(p.a_batch_stride, p.b_batch_stride);
    std::swap(p.a_div, p.b_div);
    std::swap(p.a_mod, p.b_mod);
    std::swap(p.bias_stride_m, p.bias_stride_n);
    const int32_t trans_a = p.trans_a;
    p.trans_a = !p.trans_b;
    p.trans_b = !trans_a;
    for (int i = 0; i < product->loop_count; ++i) {
      std::swap(product->loops[i].a_stride, product->loops[i].b_stride);
    }
  }
  if (p.m == 1) {
    p.trans_a = 0;
    p.lda = round_up_pitch(p.k, p.dtype);
    p.ldc = round_up_pitch(p.n, p.dtype);
  }
  if (p.n == 1) p.trans_b = 1;
  const int64_t b_rows = p.trans_b ? p.n : p.k;
  if (b_rows <= 1) p.ldb = round_up_pitch(p.trans_b ? p.k : p.n, p.dtype);
  if (p.trans_a && p.k <= 1) p.lda = round_up_pitch(p.m, p.dtype);
}

// Merges the broadcast batch axes into groups and gives the inner two to the problem's maps, the
// rest to loops.
void fill_batch(const Group* groups, int count, Product* product) {
  mp_problem& p = product->problem;
  const auto at = [&](int i) { return i < count ? groups[i] : Group{1, false, false}; };
  const Group inner = at(0);
  if (inner.size >= kMaxBatch) {
    fail(MP_INVALID, "MatMul: ", inner.size, " products in one batch; at most ", kMaxBatch - 1,
         " are possible");
  }
  const bool two = inner.size > 0 && at(1).size < kMaxBatch / inner.size;
  const Group outer = two ? at(1) : Group{1, false, false};
  p.batch = inner.size * outer.size;
  batch_map(inner.in_a, outer.in_a, inner.size, outer.size, &p.a_div, &p.a_mod);
  batch_map(inner.in_b, outer.in_b, inner.size, outer.size, &p.b_div, &p.b_mod);
  int64_t a = multiply(p.a_batch_stride, p.a_mod), b = multiply(p.b_batch_stride, p.b_mod);
  int64_t y = multiply(p.c_batch_stride, p.batch);
  for (int i = two ? 2 : 1; i < count; ++i) {
    product->loops[product->loop_count++] = {groups[i].size, groups[i].in_a ? a : 0,
                                             groups[i].in_b ? b : 0, y};
    if (groups[i].in_a) a = multiply(a, groups[i].size);
    if (groups[i].in_b) b = multiply(b, groups[i].size);
    y = multiply(y, groups[i].size);
  }
}

int32_t common_alignment(uint64_t bits) {
  bits |= kWidest;
  return static_cast<int32_t>(bits & (~bits + 1));
}

}  // namespace

std::string Shape::text() const {
  std::ostringstream out;
  out << '[';
  for (int i = 0; i < rank; ++i) out << (i ? ", " : "") << dims[i];
  out << ']';
  return out.str();
}

void matmul_product(const Shape& a, const Shape& b, bool trans_b, Element element, Product* out) {
  if (trans_b && b.rank < 2) {
    fail(MP_INVALID, "MatMul: a transposed B has rank 2 and more, got ", b.text());
  }
  if (a.rank == 0 || b.rank == 0) {
    fail(MP_INVALID, "MatMul takes operands of rank 1 and more, got A ", a.text(), " and B ",
         b.text());
  }
  const bool a_vector = a.rank == 1, b_vector = b.rank == 1;
  const int64_t k = a.dims[a.rank - 1];
  const int64_t b_k = b_vector ? b.dims[0] : b.dims[b.rank - (trans_b ? 1 : 2)];
  if (k != b_k) {
    fail(MP_INVALID, "MatMul: the inner dimensions of A ", a.text(), " and B ", b.text(),
         trans_b ? " (transposed)" : "", " differ: ", k, " and ", b_k);
  }
  int64_t m = a_vector ? 1 : a.dims[a.rank - 2];
  const int64_t n = b_vector ? 1 : b.dims[b.rank - (trans_b ? 2 : 1)];

  const int a_axes = std::max(0, a.rank - 2), b_axes = std::max(0, b.rank - 2);
  const int axes = std::max(a_axes, b_axes);
  Shape& y = out->output;
  y.rank = axes + !a_vector + !b_vector;
  Group groups[kMaxRank];  // innermost first
  int count = 0;
  bool b_broadcast = true;
  for (int i = 0; i < axes; ++i) {
    const int64_t a_size = i < a_axes ? a.dims[a_axes - 1 - i] : 1;
    const int64_t b_size = i < b_axes ? b.dims[b_axes - 1 - i] : 1;
    if (a_size != b_size && a_size != 1 && b_size != 1) {
      fail(MP_INVALID, "MatMul: the batch dimensions of A ", a.text(), " and B ", b.text(),
           " do not broadcast: ", a_size, " and ", b_size);
    }
    const int64_t size = a_size == 1 ? b_size : a_size;
    y.dims[axes - 1 - i] = size;
    if (size == 1) continue;
    const Group group{size, a_size != 1, b_size != 1};
    b_broadcast &= !group.in_b;
    if (count && groups[count - 1].in_a == group.in_a && groups[count - 1].in_b == group.in_b) {
      groups[count - 1].size = multiply(groups[count - 1].size, size);
    } else {
      groups[count++] = group;
    }
  }
  if (!a_vector) y.dims[axes] = m;
  if (!b_vector) y.dims[axes + !a_vector] = n;

  out->loop_count = 0;
  if (b_broadcast && count) {  // one B for all: the batch of A is more rows
    m = multiply(m, groups[0].size);
    count = 0;
  }
  fill_plain(m, n, k, element, &out->problem);
  if (trans_b) {
    out->problem.trans_b = 1;
    out->problem.ldb = k;
  }
  bool any_zero = false;
  for (int i = 0; i < count; ++i) any_zero |= groups[i].size == 0;
  if (any_zero) {
    out->problem.batch = 0;
  } else {
    fill_batch(groups, count, out);
  }
  make_canonical(out);
}

void gemm_product(const Shape& a, const Shape& b, const Shape* c, const GemmAttributes& attributes,
                  Element element, Product* out) {
  if (a.rank != 2 || b.rank != 2) {
    fail(MP_INVALID, "Gemm takes matrices, got A ", a.text(), " and B ", b.text());
  }
  const int64_t m = a.dims[attributes.trans_a], k = a.dims[!attributes.trans_a];
  const int64_t n = b.dims[!attributes.trans_b], b_k = b.dims[attributes.trans_b];
  if (k != b_k) {
    fail(MP_INVALID, "Gemm: the inner dimensions of A ", a.text(),
         attributes.trans_a ? " (transposed)" : "", " and B ", b.text(),
         attributes.trans_b ? " (transposed)" : "", " differ: ", k, " and ", b_k);
  }
  out->loop_count = 0;
  out->output.rank = 2;
  out->output.dims[0] = m;
  out->output.dims[1] = n;
  mp_problem& p = out->problem;
  fill_plain(m, n, k, element, &p);
  p.trans_a = attributes.trans_a;
  p.trans_b = attributes.trans_b;
  p.lda = p.trans_a ? m : k;
  p.ldb = p.trans_b ? k : n;
  p.alpha = attributes.alpha;
  if (c) {
    const int64_t rows = c->rank < 2 ? 1 : c->dims[0];
    const int64_t columns = c->rank < 1 ? 1 : c->dims[c->rank - 1];
    if (c->rank > 2 || (rows != 1 && rows != m) || (columns != 1 && columns != n)) {
      fail(MP_INVALID, "Gemm: C ", c->text(), " does not broadcast to the output [", m, ", ", n,
           "] of A ", a.text(), " and B ", b.text());
    }
    // beta = 0 says that C is not read, whatever it holds.
    if (attributes.beta != 0) {
      const bool by_row = rows > 1, by_column = columns > 1;
      p.beta = attributes.beta;
      p.bias = by_row && by_column ? MP_BIAS_MATRIX : MP_BIAS_VECTOR;
      p.bias_stride_m = by_row ? columns : 0;
      p.bias_stride_n = by_column ? 1 : 0;
    }
  }
  make_canonical(out);
}

void add_vector_bias(Product* product, bool along_m) {
  mp_problem& p = product->problem;
  p.bias = MP_BIAS_VECTOR;
  p.beta = 1;
  // A swapped product is the transposed one.
  p.bias_stride_m = along_m != product->swapped;
  p.bias_stride_n = !p.bias_stride_m;
}

void add_column_bias(const std::string& name, const Shape& bias, const Shape& b, float beta,
                     Product* product) {
  if (b.rank < 2) {
    fail(MP_INVALID, name, " takes B of rank 2 and more, got ", b.text(),
         ": its output has no columns to add a bias to");
  }
  const int64_t columns = b.dims[b.rank - 1];
  if (bias.rank != 1 || bias.dims[0] != columns) {
    fail(MP_INVALID, name, ": the bias ", bias.text(), " must be [", columns,
         "], the columns of B ", b.text());
  }
  add_vector_bias(product, false);
  product->problem.beta = beta;
}

void gate_columns(const std::string& name, const Shape& b, Product* product) {
  if (b.rank != 2 || b.dims[1] % 2) {
    fail(MP_INVALID, name, " takes for B a matrix whose columns are gates and values in turn, got ",
         b.text());
  }
  // B has more than one column, so that the product is not swapped; it has no batch either.
  mp_problem& p = product->problem;
  p.gated = 1;
  const int64_t columns = p.n / 2;
  p.ldc = p.m == 1 ? round_up_pitch(columns, p.dtype) : columns;
  p.c_batch_stride = multiply(p.m, columns);
  product->output.dims[product->output.rank - 1] = columns;
}

void check_residual(const std::string& name, const Shape& residual, const Shape& output) {
  if (residual.rank == output.rank &&
      std::equal(output.dims, output.dims + output.rank, residual.dims)) {
    return;
  }
  fail(MP_INVALID, name, ": the last input ", residual.text(), " must have the output's shape ",
       output.text(),
       "; it does not broadcast. If the node comes from moonpoly_ort.rewrite, the "
       "model records a wrong shape for one of the two: rewrite it with disable=[\"residual\"] "
       "(--disable residual), or without its value_info, which holds the records");
}

void set_alignment(Product* product, const void* a, const void* b, const void* y,
                   const void* residual) {
  mp_problem& p = product->problem;
  const int64_t bytes = element_bytes(p.dtype);
  // What has to keep the alignment: strides, and the length of a stored row. Elements.
  uint64_t bits_a = p.trans_a ? p.m : p.k, bits_b = p.trans_b ? p.k : p.n;
  uint64_t bits_y = output_columns(p, p.n);
  bits_a |= p.lda | (p.a_mod > 1 ? p.a_batch_stride : 0);
  bits_b |= p.ldb | (p.b_mod > 1 ? p.b_batch_stride : 0);
  bits_y |= p.ldc | (p.batch > 1 ? p.c_batch_stride : 0);
  for (int i = 0; i < product->loop_count; ++i) {
    bits_a |= product->loops[i].a_stride;
    bits_b |= product->loops[i].b_stride;
    bits_y |= product->loops[i].y_stride;
  }
  p.align_a = common_alignment(bits_a * bytes | reinterpret_cast<uintptr_t>(a));
  p.align_b = common_alignment(bits_b * bytes | reinterpret_cast<uintptr_t>(b));
  p.align_c = common_alignment(bits_y * bytes | reinterpret_cast<uintptr_t>(y) |
                               reinterpret_cast<uintptr_t>(residual));
}

}  // namespace moonpoly
