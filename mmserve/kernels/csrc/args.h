// What the kernels of every instruction set take: plain structs, no torch, no standard library.
//
// Letters as in mmserve/attention/interface.py: T tokens, H query heads, K key-value heads, D head size,
// Dv value head size, B block size. Strides are in elements. `rows` are matrix rows, `keys` cached tokens.
#pragma once

#include <cstddef>
#include <cstdint>

// Whether the compiler has the instructions of the matrix units, and its assembler does (build.py tries that).
#if defined(__x86_64__) && !defined(MMSERVE_WITHOUT_AMX) && __has_include(<amxbf16intrin.h>)
#define MMSERVE_AMX 1
#endif

namespace mmserve {

struct Bf16 {
  uint16_t bits;
};

// y[rows, n] = x[rows, k] * weight[n, k]^T + bias (+ residual); weight rows are contiguous.
struct LinearArgs {
  const void* x;         // [rows, k], row stride x_stride
  const void* weight;    // [n, k]
  const void* bias;      // [n] or null
  const void* residual;  // [rows, n], row stride y_stride, or null
  void* y;               // [rows, n], row stride y_stride
  int64_t rows, n, k;
  int64_t x_stride, y_stride;
};

enum class Activation { kNone, kGeluTanh, kQuickGelu };

// y[rows, n] = activation(x[rows, k] * weight[n, k]^T + bias) (+ residual), for many rows; weight rows are contiguous.
struct DenseArgs {
  const void* x;         // [rows, k], row stride x_stride
  void* packed;          // dense_bytes: the rows as the tiles want them
  const void* weight;    // [n, k]
  const void* bias;      // [n] or null
  const void* residual;  // [rows, n], row stride y_stride, or null
  void* y;               // [rows, n], row stride y_stride
  int64_t rows, n, k;
  int64_t x_stride, y_stride;
  Activation activation;
};

// Where the keys and values of one sequence lie: key j is in slot (table ? table[j / B] * B + j % B : j).
struct KeySource {
  const void* key;       // of slot 0, head 0
  const void* value;     // of slot 0, head 0
  const int32_t* table;  // blocks of the sequence, or null
  int64_t block_size;
  int64_t key_slot, key_head, value_slot, value_head;
};

// What all sequences of one attention call share.
struct AttentionArgs {
  const void* query;  // [T, H, D]
  void* out;          // [T, H, Dv]
  const int32_t* lo;  // [T] first key that the query sees, or null: 0
  const int32_t* hi;  // [T] one past the last key that it sees, or null: all
  int64_t query_token, query_head, out_token, out_head;
  int64_t group;  // H / K
  int64_t d, dv;
  float scale;
  float soft_cap;  // 0: none
};

// One (sequence, key head) of a prefill: its queries against its keys, packed for the tiles.
struct FlashJob {
  KeySource source;
  int64_t kv_head;
  int64_t first_token, num_tokens;  // queries, in the packed batch
  int64_t num_keys;
  void* keys;    // packed: see flash.h
  void* values;  // packed
};

// One split of the keys of one (sequence, key head) of a decode step.
struct DecodeJob {
  KeySource source;
  int64_t kv_head;
  int64_t token;
  int64_t begin, end;  // keys
  float* partial;      // [group, Dv + 2]: unnormalised output, maximum, sum; or null: write the result
};

struct PackSizes {
  int64_t key_bytes, value_bytes;
};

// How a large product is cut into items: so many panels of rows by a band of weight rows.
struct DenseBlock {
  int64_t panels;
  bool rows_stay;  // in a core's own cache, while bands of weight rows pass; else a band stays while rows pass
};

// One instruction set's kernels for one element type.
struct Kernels {
  void (*linear)(const LinearArgs&, int64_t n_begin, int64_t n_end);

  int64_t (*dense_panels)(int64_t rows);
  int64_t (*dense_bytes)(int64_t rows, int64_t k);
  void (*dense_pack)(const DenseArgs&, int64_t panel);
  DenseBlock (*dense_block)(int64_t k);
  int64_t (*dense_scratch)(int64_t k);
  void (*dense)(const DenseArgs&, int64_t panel_begin, int64_t panel_end, int64_t n_begin, int64_t n_end, void* scratch);

  PackSizes (*flash_sizes)(const AttentionArgs&, int64_t num_keys);
  void (*flash_pack)(const AttentionArgs&, const FlashJob&, int64_t key_begin, int64_t key_end);
  int64_t (*flash_scratch)(const AttentionArgs&);
  void (*flash_rows)(const AttentionArgs&, const FlashJob&, int64_t row_begin, int64_t row_end, void* scratch);

  void (*decode)(const AttentionArgs&, const DecodeJob&);
  void (*decode_merge)(const AttentionArgs&, const DecodeJob* splits, int64_t count);

  // out[w] = x[w] / rms(x) * weight[w]
  void (*rms_norm)(const void* x, const void* weight, float eps, void* out, int64_t width);
  // out[w] = (x[w] - mean(x)) / deviation(x) * weight[w] + bias[w]
  void (*layer_norm)(const void* x, const void* weight, const void* bias, float eps, void* out, int64_t width);
  // out[w] = silu(gate[w]) * up[w]
  void (*silu_mul)(const void* gate, const void* up, void* out, int64_t width);
  // out[w] = gelu(x[w]), the tanh form; out may be x
  void (*gelu_tanh)(const void* x, void* out, int64_t width);
  // out[d] = x rotated: halves (x1, x2) -> (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2); out may be x
  void (*rotate)(const void* x, const void* cos, const void* sin, void* out, int64_t d);
  // out[begin .. end - 1]: the sum of `count` parts in their order, in float; out may be one of them
  void (*sum)(const void* const* parts, int64_t count, void* out, int64_t begin, int64_t end);
};

struct InstructionSet {
  const char* name;
  Kernels bf16, f32;
  bool dense_bf16;   // whether its dense products of bf16 are as fast as a processor without matrix units can be
  bool matrix_bf16;  // whether attention and products of bf16 run on matrix units, the latter by `dense` for any rows
};

constexpr int64_t kFlashRows = 48;     // query rows of one flash_rows call
constexpr int64_t kDecodeSplit = 256;  // keys of a split: fixed, so that a result does not depend on the batch
constexpr int64_t kLinearRows = 16;    // the most rows that `linear` takes
constexpr int64_t kDenseColumns = 48;  // outputs of `dense` whose sums lie in the first-level cache until they are turned
constexpr int64_t kBandColumns = 96;   // a band of many rows is so many outputs or a multiple: whole tiles of every set
constexpr int64_t kDenseRows = 64;     // the fewest rows for which `dense` without matrix units is better than torch
constexpr int64_t kMatrixRows = 128;   // the most for which `dense` on matrix units is better than torch on them
constexpr int64_t kPackStep = 64;      // flash_pack ranges begin at multiples of this

#if defined(MMSERVE_AMX)
namespace amx {
const InstructionSet& instruction_set();
}
#endif
#if defined(__x86_64__) || defined(_M_X64)
namespace avx512 {
const InstructionSet& instruction_set();
}
namespace avx2 {
const InstructionSet& instruction_set();
}
#endif
namespace plain {
const InstructionSet& instruction_set();
}

}  // namespace mmserve
