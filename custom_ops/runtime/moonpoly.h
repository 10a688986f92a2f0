// clang-format off: members and codes are grouped by meaning.
// The flat C surface of libmoonpoly_ort and the layout of a kernel pack.
//
// Python (ctypes), the tuner and C++ programs use this header; ONNX Runtime uses only RegisterCustomOps.
// Every struct here is plain data with fixed-width members and no implicit padding; Python mirrors
// them in moonpoly_ort/native_structs.py (call structs) and custom_ops/kernels/pack_format.py (pack structs),
// and tests compare sizes and offsets through mp_struct_size.
//
// Conventions: functions return MP_OK or an mp_status; mp_last_error() then gives the text for the
// calling thread. No function throws. Matrices are row-major; leading dimensions and batch strides
// count elements; sizes named *_bytes count bytes; times are microseconds.
#ifndef MOONPOLY_H_
#define MOONPOLY_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MP_API_VERSION 5
#define MP_PACK_VERSION 6

typedef enum mp_status {
  MP_OK = 0,
  MP_INVALID = 1,      // an argument or a shape is not legal
  MP_NO_DRIVER = 2,    // libcuda is absent or offers no device
  MP_BAD_PACK = 3,     // missing, truncated, corrupt, other version, other architecture
  MP_NO_KERNEL = 4,    // the pack holds no kernel for this problem
  MP_CUDA = 5,         // a driver call failed
  MP_INTERNAL = 6
} mp_status;

typedef enum mp_dtype { MP_F16 = 0, MP_BF16 = 1, MP_F32 = 2 } mp_dtype;
// How fp32 products are multiplied. fp16 and bf16 problems always say MP_TF32 (the field is ignored).
typedef enum mp_precision { MP_TF32 = 0, MP_IEEE = 1 } mp_precision;
// Bias (Gemm's C) by its broadcast: scalar and row and column all fit strides of 0 or 1.
typedef enum mp_bias { MP_BIAS_NONE = 0, MP_BIAS_VECTOR = 1, MP_BIAS_MATRIX = 2 } mp_bias;

// What becomes of a result before it is rounded to Y's type, with the two numbers act_alpha and act_beta.
// NaN stays NaN.
typedef enum mp_activation {
  MP_ACT_NONE = 0,
  MP_ACT_RELU = 1,
  MP_ACT_LEAKY_RELU = 2,    // x < 0: alpha * x
  MP_ACT_CLIP = 3,          // from alpha to beta
  MP_ACT_SIGMOID = 4,
  MP_ACT_TANH = 5,
  MP_ACT_HARD_SIGMOID = 6,  // alpha * x + beta, from 0 to 1
  MP_ACT_HARD_SWISH = 7,    // x * (x / 6 + 0.5, from 0 to 1)
  MP_ACT_GELU = 8,          // x * (normal distribution of x)
  MP_ACT_GELU_TANH = 9,     // its approximation by tanh
  MP_ACT_QUICK_GELU = 10,   // x * sigmoid(alpha * x)
  MP_ACT_SILU = 11          // x * sigmoid(x)
} mp_activation;

// What becomes of another tensor R, of Y's type, shape and layout.
typedef enum mp_residual {
  MP_RESIDUAL_NONE = 0,
  MP_RESIDUAL_BEFORE = 1,      // added before the activation
  MP_RESIDUAL_AFTER = 2,       // added to its result
  MP_RESIDUAL_MULTIPLIED = 3   // multiplied with its result
} mp_residual;

// ---- the problem ---------------------------------------------------------------------------------
// Y[z] = act(alpha * op(A[a(z)]) @ op(B[b(z)]) + beta * C),   z in [0, batch),
// with R[z], where there is one, added or multiplied as `residual` says; in fp32, rounded once. Gated:
// Y[z] is M x N / 2, and each of its elements the product of columns 2 i and 2 i + 1 of what stands in
// brackets, the even one with its activation.
//   a(z) = (z / a_div) % a_mod, likewise b(z): covers full, absent, inner and outer broadcast.
//   op(A) is M x K, stored as M rows of lda (trans_a = 0) or K rows of lda (trans_a = 1); B alike.
//   C is addressed as C[m * bias_stride_m + n * bias_stride_n], the same for every z.
typedef struct mp_problem {
  int32_t dtype, precision;  // mp_dtype, mp_precision
  int32_t trans_a, trans_b;
  int64_t m, n, k, batch;
  int64_t lda, ldb, ldc;
  int64_t a_batch_stride, b_batch_stride, c_batch_stride;
  int32_t a_div, a_mod, b_div, b_mod;
  // Largest power of two <= 16 that divides, in bytes: base pointer, row pitch, batch stride and the
  // length of a stored row (kernels load in units of it and mask whole units). align_c is that of Y and
  // of R, which is addressed as Y. For A and B, 16 may
  // also mean that every row is followed by zeros up to the next 16 bytes: they are then loaded.
  int32_t align_a, align_b, align_c;
  int32_t bias;  // mp_bias
  int64_t bias_stride_m, bias_stride_n;
  float alpha, beta;
  int32_t activation, residual;  // mp_activation, mp_residual
  float act_alpha, act_beta;
  // 1: gated, as above. N is even, ldc, c_batch_stride and align_c are of the N / 2 columns of Y, and
  // there is no R.
  int32_t gated;
  // 1: Y of an fp16 or bf16 product is fp32, rounded to that type all the same: the product followed by
  // a cast. ldc and c_batch_stride count its elements; align_c is that of its base address and of its
  // rows, were they of the product's type. There is no activation and no R.
  int32_t wide;
} mp_problem;

// ---- the convolution -----------------------------------------------------------------------------
// ONNX's Conv and ConvTranspose of one dtype at given sizes, as an implicit product for each image and
// group: Y[k, p] = act(bias[k] + sum over channels c and taps t of W[k, c, t] * X[c, at(p, t)]), and R
// with it, as in mp_problem.
//   X is (n, groups * c, in[0..2]), Y is (n, groups * k, out[0..2]), both contiguous.
//   Axes are depth, height, width; where there are fewer, the leading ones have size 1.
//   at, for each axis: p * stride - pad + t * dilation, and transposed (p + pad - t * dilation) / stride
//   where that divides; where it lies outside of X, or does not divide, X counts as 0.
//   W[g, k, c, t] = w[g * w_g + k * w_k + c * w_c + (t[0] * kernel[1] + t[1]) * w_h + t[2] * w_w]
typedef struct mp_conv {
  int32_t dtype, precision;  // as in mp_problem
  int32_t transposed;
  int32_t bias;              // 1: one value for each of the groups * k channels of Y
  int64_t n, groups;
  int64_t c, k;              // channels of X and of Y, of one group
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];  // pad: in front
  int64_t w_g, w_k, w_c, w_h, w_w;  // elements
  // W is stored for kernels that cover so many taps along the width at a time (1, 4 or 8), with 16
  // bytes of alignment of base, w_g, w_k and w_h; 0: it is stored anyhow.
  //   1: w_c is 1, w_w is aligned too, and zeros follow the channels up to 16 bytes.
  //   4, 8: w_w is 1, w_c the width of the kernel rounded up to so many taps, which are zero.
  int32_t w_taps;
  int32_t activation, residual;  // mp_activation, mp_residual
  float act_alpha, act_beta;
  int32_t reserved;
} mp_conv;

typedef enum mp_auto_pad { MP_NOTSET = 0, MP_SAME_UPPER = 1, MP_SAME_LOWER = 2, MP_VALID = 3 } mp_auto_pad;

// The attributes of an ONNX node. A list's count is 0 where the node lacks it, else the number of spatial
// axes; of pads twice that, all begins first.
typedef struct mp_conv_attributes {
  int32_t transposed, auto_pad;
  int64_t group;
  int32_t kernel_count, stride_count, dilation_count, pad_count;
  int32_t output_padding_count, output_shape_count;  // of ConvTranspose
  int64_t kernel[3], stride[3], dilation[3], pad[6], output_padding[3], output_shape[3];
} mp_conv_attributes;

// ---- the device ----------------------------------------------------------------------------------
typedef struct mp_device {
  char name[64];
  int32_t sm;  // 90 for compute capability 9.0
  int32_t sm_count;
  int32_t shared_per_sm, shared_per_block;  // bytes; the second is the opt-in limit
  int32_t registers_per_sm, threads_per_sm, blocks_per_sm;
  int32_t clock_mhz, memory_clock_mhz, memory_bus_bits;
  int64_t l2_bytes, memory_bytes;
  double bandwidth_gbps;  // the memory's peak; 0: derive from memory clock and bus
} mp_device;

// ---- the plan ------------------------------------------------------------------------------------
#define MP_MAX_REGIONS 16
// As the kernel of a region: not one of the pack, but cuBLASLt's own choice. Then `grid` is 1, `split`
// 1, and workspace_bytes the most that it may take.
#define MP_VENDOR (-2)

// One launch: rows [m0, m0+m), columns [n0, n0+n), batch entries [z0, z0+z) of Y.
// The kernel sees the region as a problem of its own: operand pointers are moved by the launcher to row m0
// and column n0. They are not moved by z0: the kernel adds it to its batch entry, for A and B before the
// div/mod map, so tensor maps span a_mod, b_mod and all of the problem's batch entries. Workspace and
// counters are indexed by the entry within the region.
typedef struct mp_region {
  int32_t kernel;  // index in the pack, or MP_VENDOR
  int32_t split;   // K is cut into this many slices (persistent: at most about so many); 1: no workspace used
  int64_t m0, m, n0, n, z0, z;
  int64_t grid;    // blocks of the one-dimensional grid
  int64_t workspace_bytes;  // fp32 partials of this region; 0 when split == 1
  int64_t counters;         // int32 arrival counters of this region; 0 when split == 1
  double predicted_us;
  // Where this region's partials and counters lie in the plan's: bytes (a multiple of 256) and int32.
  int64_t workspace_offset, counters_offset;
  // 1: launched beside the region before it, which needs programmatic dependent launch (elsewhere
  // they run one after another): they write disjoint parts of Y and share no workspace or counters.
  int32_t joins_previous;
  int32_t reserved;
} mp_region;

// Before the regions run, an operand is copied to the workspace with its rows along K, padded with
// zeros to whole units of 16 bytes. The regions then see the problem with that operand in its place:
// trans_a = 0 (or trans_b = 1), its pitch, its batch stride and an alignment of 16 bytes.
typedef struct mp_copy {
  int32_t kernel;       // of family MP_COPY_PADDED
  int32_t transposed;   // 1: the operand's rows do not lie along K
  int64_t offset, bytes;         // in the workspace; 0 bytes: no copy
  int64_t pitch, batch_stride;   // elements, of the copy
  int64_t grid;
} mp_copy;

typedef struct mp_plan {
  int32_t region_count;
  int32_t measured;  // 1: costs came from a measured table, 0: analytic model
  // What the regions need in all: those that run side by side add up, others use the same memory.
  int64_t workspace_bytes;
  int64_t counters;
  double predicted_us;
  mp_region regions[MP_MAX_REGIONS];
  mp_copy copies[2];    // of A, of B
} mp_plan;

// ---- the pack ------------------------------------------------------------------------------------
// File: mp_pack_header | mp_kernel[kernel_count] | mp_param lists (int32) | mp_table[table_count] each
// followed by its mp_cost[kernel_count] and mp_vendor_cost[vendor_count] | strings | cubins (each 64-byte aligned). Little-endian.
// A pack without cubins ("catalog", cubin_bytes == 0 everywhere) can plan but not launch.

typedef enum mp_family {
  // Operands and result through TMA tensor maps; 16-byte aligned, sm_90 and up, K > 0 (a map cannot be empty).
  // TF32: maps of A and B have type TFLOAT32, which rounds to nearest; the tensor core alone truncates.
  MP_GEMM_TMA = 0,
  MP_GEMM_POINTER = 1,  // masked loads
  // As MP_GEMM_TMA, for sm_90: persistent blocks, a loading warpgroup and one to three consumers.
  MP_GEMM_WS = 2,
  // Layout NT: a block has all of K for a few outputs, on the scalar units; any alignment.
  MP_GEMM_DOT = 6,
  // Outer products on the scalar units, unrolled: K up to bk, any alignment.
  MP_GEMM_SHALLOW = 7,
  // As MP_GEMM_TMA, but Y is stored through masks: any alignment of Y.
  MP_GEMM_TMA_MASKED = 8,
  // No product: Y (M x N) = op(A) (M x K), then zeros up to N. Layout NT as it is, TN transposing.
  MP_COPY_PADDED = 9,
  // Layout NN, few rows: a block has a few columns of B and reads rows of them, on the scalar units.
  MP_GEMV = 10,
  // Convolutions (mp_conv), through masked loads. A region's m are the channels of Y of one group, its n
  // the pixels of whole images, one image behind the other, its batch entries groups.
  MP_CONV = 16,             // K steps of channels at one tap
  MP_CONV_TAPS4 = 17,       // K steps of channels at 4 taps along the width; not transposed
  MP_CONV_TAPS8 = 18,
  MP_CONV_TRANSPOSED = 19,  // as MP_CONV
  // c = 1, on the scalar units; bk: taps along the width, 1 for any. A region's m are the channels of all groups,
  // its n the pixels of one image, its batch entries images.
  MP_CONV_DEPTHWISE = 20,
  MP_CONV_DEPTHWISE_TRANSPOSED = 21
} mp_family;

// A kernel's parameters in order, so that the launcher needs no knowledge of a family's signature.
// A DESC parameter expands to a 128-byte CUtensorMap, then rank i32 shapes, then rank i64 strides,
// rank 3: (batch, rows, columns) of the stored matrix.
typedef enum mp_param {
  MP_P_DESC_A = 1, MP_P_DESC_B, MP_P_DESC_Y,
  MP_P_PTR_A, MP_P_PTR_B, MP_P_PTR_Y, MP_P_PTR_BIAS, MP_P_PTR_WORKSPACE, MP_P_PTR_COUNTERS,
  MP_P_M, MP_P_N, MP_P_K, MP_P_SPLIT,          // i32; M, N of the region
  MP_P_A_DIV, MP_P_A_MOD, MP_P_B_DIV, MP_P_B_MOD, MP_P_Z0,  // i32; Z0: the region's first batch entry
  MP_P_LDA, MP_P_LDB, MP_P_LDC,                // i64
  MP_P_A_BATCH, MP_P_B_BATCH, MP_P_C_BATCH,    // i64
  MP_P_BIAS_M, MP_P_BIAS_N,                    // i64
  MP_P_ALPHA, MP_P_BETA,                       // f32
  MP_P_NULL,                                   // a null pointer (Triton's scratch parameters)
  MP_P_BATCH,                                  // i32; batch entries of the region
  MP_P_ORDER,                                  // i32; mp_order
  MP_P_PTR_RESIDUAL,                           // null where there is none; Y of gated and wide products
  MP_P_ACTIVATION,                             // i32; activation | residual << 8 | gated << 16 | wide << 17
  MP_P_ACT_ALPHA, MP_P_ACT_BETA,               // f32
  // Of convolutions. PIXELS: i32, of one image of Y. CHANNEL: i64, elements of one channel of X. X, Y and the
  // residual point at the region's first image.
  MP_P_CONV_X = 64, MP_P_CONV_W, MP_P_CONV_Y, MP_P_CONV_BIAS,  // pointers; BIAS is Y where there is none
  MP_P_CONV_C, MP_P_CONV_K, MP_P_CONV_GROUPS, MP_P_CONV_HAS_BIAS,  // i32
  MP_P_CONV_IN_D, MP_P_CONV_IN_H, MP_P_CONV_IN_W, MP_P_CONV_OUT_H, MP_P_CONV_OUT_W,
  MP_P_CONV_KERNEL_D, MP_P_CONV_KERNEL_H, MP_P_CONV_KERNEL_W,
  MP_P_CONV_STRIDE_D, MP_P_CONV_STRIDE_H, MP_P_CONV_STRIDE_W,
  MP_P_CONV_DILATION_D, MP_P_CONV_DILATION_H, MP_P_CONV_DILATION_W,
  MP_P_CONV_PAD_D, MP_P_CONV_PAD_H, MP_P_CONV_PAD_W, MP_P_CONV_PIXELS,
  MP_P_CONV_CHANNEL, MP_P_CONV_W_G, MP_P_CONV_W_K, MP_P_CONV_W_C, MP_P_CONV_W_H, MP_P_CONV_W_W  // i64
} mp_param;

// What a kernel with dependent_launch does at run time. Only one that has a parameter ORDER can run
// beside the kernel in front of it, or let the one behind it do so.
typedef enum mp_order {
  // Lets the next kernel be placed, then waits for the one in front of it.
  MP_ORDER_IN_TURN = 0,
  // Waits first: the next kernel, which then need not wait itself, starts when all that came before
  // this one is complete.
  MP_ORDER_LETS_NEXT_JOIN = 1,
  // Waits at its end instead: it is complete only when the kernel in front of it is, too.
  MP_ORDER_JOINS_PREVIOUS = 2
} mp_order;

typedef struct mp_desc_shape {  // how the TMA box of one operand was compiled
  int32_t box[3];               // elements: batch (1), rows, columns
  int32_t swizzle;              // Triton's code: 0 none, 1 32 B, 2 64 B, 3 128 B
} mp_desc_shape;

typedef struct mp_kernel {
  char name[96];   // unique in the pack, e.g. gemm_tma_f16_nn_128x256x64_w8_s3
  char entry[64];  // symbol in the cubin
  int32_t family, dtype, precision;
  int32_t trans_a, trans_b;
  int32_t bm, bn, bk;
  int32_t warps, stages;      // threads per block = 32 * warps
  int32_t group_m;            // tile rows per L2 swizzle group
  int32_t split_k;            // 1: compiled with the split-K epilogue (needs split >= 2)
  int32_t swap;               // 1: computes the transposed tile
  int32_t bias_matrix;        // 1: takes MP_BIAS_MATRIX too; 0: NONE and VECTOR only
  int32_t align_a, align_b, align_c;  // least alignment it accepts, bytes (16, 8, 4, 2)
  int32_t shared_bytes;       // dynamic shared memory
  int32_t registers;          // per thread; from the compiled code, or an estimate in a catalog
  int32_t param_offset, param_count;  // into the param list, in int32
  mp_desc_shape desc[3];      // A, B, Y; zeros when unused
  // 1: compiled for programmatic dependent launch (sm_90 and up): it waits for the kernel in front
  // of it on the stream by itself, before it touches memory, so it may be launched early. It need
  // not be: a grid of many blocks is better launched in turn.
  int32_t dependent_launch;
  // 1: blocks walk over tiles, so the grid is at most what the device holds at once. With split_k
  // the K steps of the last tiles are dealt to the blocks in equal shares, `split` of them a tile
  // where the device holds that many: each block then has a partial tile in the workspace, and each
  // consumer warpgroup (warps / 4 - 1 of them) of each block a counter.
  int32_t persistent;
  int32_t tf32x3;             // 1: MP_IEEE on tensor cores, by three TF32 products of split factors
  // 1: a persistent kernel with split_k whose blocks have one of `split` slices of one tile each, and
  // add up the parts of a tile together; tiles * split is at most what the device holds at once.
  int32_t sliced;
  int32_t pingpong;  // 1: a persistent kernel whose two consumer warpgroups take whole tiles in turn
  int64_t cubin_offset, cubin_bytes;  // from the start of the file
} mp_kernel;

typedef struct mp_cost {  // measured at native occupancy; all zero: not measured, use the analytic model
  float fixed_us;         // one wave without its K loop: prologue, epilogue, split-K: storing a slice
  float step_us;          // one K step of BK of a full wave
  float single_step_us;   // one K step when no SM holds more than one block; where none can: when few SMs work
  float blocks_per_sm;    // below 0: the kernel is never chosen on this GPU
} mp_cost;

typedef struct mp_table {
  char gpu[64];  // exact device name
  int32_t sm_count;
  int32_t vendor_count;   // classes of problems for which cuBLASLt was measured; 0: it is never chosen
  double bandwidth_gbps;  // of the memory, as the timings show it
  double launch_us;       // an empty kernel, back to back on one stream
} mp_table;

// The time of cuBLASLt's first choice on one class of problems, fitted to timings. It is the least of
// those of a few tiles, each with K cut into 1, f / 2 or f <= 16 slices, f = SMs / tiles,
//   fixed + epilogue * waves * area + hypot(loop, traffic) + (split > 1: split + slice * split * area)
//   loop = K steps of 64 per slice * step_us * (full waves + last: lone + (1 - lone) * share of SMs)
// with areas in units of 64 x 64 elements, one block an SM; times the exponential of
// misaligned[operand][2, 4, 8 bytes] for A, B and Y, and of `nodes` interpolated linearly between
// log2 of M, N, K = first + node * MP_VENDOR_NODE_STEP (first: 0, 3, 3).
#define MP_VENDOR_TILES 8
#define MP_VENDOR_NODES 5
#define MP_VENDOR_NODE_STEP 3.5
typedef struct mp_vendor_tile {
  int32_t bm, bn;
  float step_us;  // one K step of 64 of a full wave
} mp_vendor_tile;
typedef struct mp_log_factors {
  float misaligned[3][3];
  float nodes[MP_VENDOR_NODES * MP_VENDOR_NODES * MP_VENDOR_NODES];  // K fastest
} mp_log_factors;
typedef struct mp_vendor_cost {
  int32_t dtype, precision, trans_a, trans_b;
  int32_t aligned;  // 1: A, B and Y at 16 bytes; 0: not all of them
  int32_t batched;  // 1: batch > 1
  int32_t tile_count;
  float margin;     // it is chosen where this times its prediction is below that of the other plan
  float fixed_us, epilogue_us, split_us, slice_us;
  float lone_share;
  float bandwidth_gbps;
  mp_vendor_tile tiles[MP_VENDOR_TILES];
  mp_log_factors correction;
  // What plans of the pack's kernels took, over what was predicted: their prediction is multiplied
  // by this before the two are compared. The least of many predictions is too low more often than not.
  mp_log_factors promise;
} mp_vendor_cost;

typedef struct mp_pack_header {
  char magic[8];        // "MOONPACK"
  uint32_t version;     // MP_PACK_VERSION
  uint32_t sm;          // 90
  uint64_t file_bytes;  // whole file: a shorter one is truncated
  // Of everything behind the header, as little-endian 64-bit words w[i] (zero-padded): the sum modulo
  // 2^64 of (w[i] ^ (w[i] >> 32)) * (2 * i + 0x9E3779B97F4A7C15). Vectorises; FNV-1a cannot.
  uint64_t checksum;
  uint32_t kernel_count, param_count, table_count, header_bytes;
  int64_t kernels_offset, params_offset, tables_offset, cubins_offset;
  char key[64];         // hex SHA-256 of kernel sources, specs, Triton version
  char triton[32];
} mp_pack_header;

typedef struct mp_pack mp_pack;

// ---- functions -----------------------------------------------------------------------------------
int32_t mp_api_version(void);
const char* mp_last_error(void);
// Bytes of the struct of that name ("mp_plan"), or -1: lets a binding check itself.
int32_t mp_struct_size(const char* name);

mp_status mp_pack_open(const char* path, mp_pack** out);  // verifies header, size and checksum
void mp_pack_close(mp_pack* pack);
int32_t mp_pack_kernel_count(const mp_pack* pack);
const mp_kernel* mp_pack_kernel(const mp_pack* pack, int32_t index);
const mp_pack_header* mp_pack_info(const mp_pack* pack);

mp_status mp_device_count(int32_t* out);
mp_status mp_device_query(int32_t ordinal, mp_device* out);
// Blocks of a kernel that one SM holds, by CUDA's occupancy rules; 0: it does not fit, or is no kernel.
int32_t mp_blocks_per_sm(const mp_kernel* kernel, const mp_device* device);

// What a plan must do without (tuner, ablations); a sum of these.
typedef enum mp_plan_flags {
  MP_PLAN_NO_SPLIT = 1,    // K in slices
  MP_PLAN_NO_REGIONS = 2,  // two kernels for one product
  MP_PLAN_NO_VENDOR = 4,   // cuBLASLt
  MP_PLAN_NO_STREAM = 8    // K dealt to persistent blocks
} mp_plan_flags;

// Plans a problem; pure arithmetic, needs no GPU. `only_kernel` >= 0 and `only_split` >= 1 force a choice
// (tuner, tests); -1 and 0 let the planner choose. `only_kernel` MP_VENDOR forces cuBLASLt, which is
// planned whether or not its library is here, with a catalog only by force. `flags`: mp_plan_flags.
// (tuner, tests); -1 and 0 let the planner choose. A kernel of family MP_COPY_PADDED is forced by copying
// A and B with it, whatever their alignment, in front of what the planner chooses for the copies.
mp_status mp_plan_problem(const mp_pack* pack, const mp_device* device, const mp_problem* problem,
                          int32_t only_kernel, int32_t only_split, int32_t flags, mp_plan* out);

// The problem that an ONNX node amounts to at given shapes, formed as the custom ops form it (A and B
// may swap places), for buffers that start 16-byte aligned. `launches`: batch axes beyond two groups
// are looped over, so often is the problem launched. m, n or batch of 0: there is nothing to launch.
// trans_b: the last two axes of B, whose shape is the one as stored, change places first.
mp_status mp_matmul_problem(int32_t dtype, int32_t precision, int32_t a_rank, const int64_t* a_dims,
                            int32_t b_rank, const int64_t* b_dims, int32_t trans_b, mp_problem* out,
                            int64_t* launches);
// Shapes as stored, before trans_a and trans_b. c_dims may be null.
mp_status mp_gemm_problem(int32_t dtype, int32_t precision, const int64_t* a_dims,
                          const int64_t* b_dims, int32_t c_rank, const int64_t* c_dims,
                          int32_t trans_a, int32_t trans_b, float alpha, float beta,
                          mp_problem* out);

// A constant B can be copied once, with its rows along K and padded to 16 bytes, where that may help:
// rows that are not 16-byte aligned and, on sm_90, TF32 factors that do not lie along K. `out` is the
// problem for the copy, `bytes` its size; 0 where a copy has no use or the pack has no kernel for it,
// and `out` is then the problem itself. Which of the two is faster, their plans say.
mp_status mp_repacked_problem(const mp_pack* pack, const mp_problem* problem, mp_problem* out,
                              int64_t* bytes);

// What ONNX Conv or ConvTranspose amounts to at given shapes, formed as the custom ops form it, for W as
// ONNX stores it. `out_dims` receives the x_rank dimensions of Y. `pointwise` 1: it is the product
// `problem` (its A is W where `w_is_a` is 1, else W is its B), 0: the convolution `conv`. Where Y has no
// elements there is nothing to launch.
mp_status mp_conv_problem(int32_t dtype, int32_t precision, const mp_conv_attributes* attributes,
                          int32_t x_rank, const int64_t* x_dims, int32_t w_rank, const int64_t* w_dims,
                          int32_t bias, int64_t* out_dims, mp_conv* conv, mp_problem* problem,
                          int32_t* pointwise, int32_t* w_is_a);

// W of `conv` for kernels that load it 16 bytes at a time: `out` is the convolution with the strides of
// the copy, `bytes` its size; 0 where it has no use (depthwise, or W is stored so already: 1 x 1 kernels of
// whole units of channels), and `out` is then `conv` itself.
mp_status mp_conv_packed(const mp_conv* conv, mp_conv* out, int64_t* bytes);
// Makes that copy, in host memory; for MP_TF32 it is rounded to that.
mp_status mp_conv_pack(const mp_conv* conv, const void* w, void* packed);

// As mp_plan_problem. `flags`: mp_plan_flags.
mp_status mp_plan_conv(const mp_pack* pack, const mp_device* device, const mp_conv* conv,
                       int32_t only_kernel, int32_t only_split, int32_t flags, mp_plan* out);

// Launches a plan on raw device pointers. stream: CUstream. workspace and counters must be at least
// as large as the plan says, workspace 16-byte aligned; counters must be zero and are left zero. Regions
// may run side by side, so no other thread may queue launches with the same counters meanwhile.
// MP_INVALID: regions that are not as mp_plan_problem makes them (grid, split, scratch, alignment).
typedef struct mp_launcher mp_launcher;  // a pack loaded on one device
mp_status mp_launcher_create(const mp_pack* pack, int32_t ordinal, mp_launcher** out);
void mp_launcher_destroy(mp_launcher* launcher);
mp_status mp_launch(mp_launcher* launcher, const mp_problem* problem, const mp_plan* plan, const void* a,
                    const void* b, const void* bias, const void* residual, void* y, void* workspace,
                    void* counters, void* stream);

// Enqueues the copy of B that mp_repacked_problem describes; `packed` is 16-byte aligned.
mp_status mp_repack(mp_launcher* launcher, const mp_problem* problem, const void* b, void* packed,
                    void* stream);

mp_status mp_launch_conv(mp_launcher* launcher, const mp_conv* conv, const mp_plan* plan, const void* x,
                         const void* w, const void* bias, const void* residual, void* y,
                         void* workspace, void* counters, void* stream);

// The interpreter backend: the CPU custom ops call this with host pointers (GIL taken by ctypes).
// Returns 0, or non-zero after storing an error text in `error` (NUL-terminated, `error_bytes` long).
typedef int32_t (*mp_interpret_fn)(const mp_problem* problem, const mp_plan* plan, const void* a,
                                   const void* b, const void* bias, const void* residual, void* y,
                                   char* error, int32_t error_bytes);
void mp_set_interpreter(mp_interpret_fn fn);
typedef int32_t (*mp_interpret_conv_fn)(const mp_conv* conv, const mp_plan* plan, const void* x,
                                        const void* w, const void* bias, const void* residual,
                                        void* y, char* error, int32_t error_bytes);
void mp_set_conv_interpreter(mp_interpret_conv_fn fn);

typedef struct mp_stats {  // since the library was loaded, all sessions
  int64_t plan_hits, plan_misses, launches;
  double plan_miss_us_total, plan_miss_us_max;
} mp_stats;
void mp_get_stats(mp_stats* out);

#ifdef __cplusplus
}
#endif
#endif  // MOONPOLY_H_
