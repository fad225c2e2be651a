// What runs on tensors: checks them, cuts the work into items, and calls the kernels of the active set.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>

#include "dispatch.h"

namespace mmserve {

using MaybeTensor = std::optional<at::Tensor>;

// How a packed batch lies over the cache; the letters are those of mmserve/attention/interface.py.
struct Batch {
  at::Tensor cu_seqlens_q;  // int32 [S + 1]
  at::Tensor key_lens;      // int32 [S]
  at::Tensor block_tables;  // int32 [S, blocks]
  at::Tensor lo, hi;        // int32 [T]: the interval of keys that each query sees
};

// x [rows, k], rows <= 16; weight [n, k]; bias [n]; residual [rows, n] -> [rows, n].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const MaybeTensor& residual);

// x [rows, k], any number of rows; weight [n, k]; bias [n]; residual [rows, n] -> [rows, n].
at::Tensor dense(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const MaybeTensor& residual,
                 const std::string& activation);
// The same over plain memory; `args.packed` is taken from the workspace.
void run_dense(const Kernels& kernels, DenseArgs args, int64_t element_size);
Activation activation_named(const std::string& name);

// key [T, K, D], value [T, K, Dv] into key_cache [N, B, K, D], value_cache [N, B, K, Dv] at slots int64 [T].
void write_cache(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                 const at::Tensor& value_cache, const at::Tensor& slots);

// query [T, H, D] over the cache -> [T, H, Dv].
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const Batch& batch, double scale, double soft_cap);

// query [B, H, S, D], key [B, K, L, D], value [B, K, L, Dv], every query sees every key -> [B, S, H, Dv].
at::Tensor full_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale);
// The same into `out`, a contiguous [B, S, H, Dv].
void full_attention_into(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale,
                         at::Tensor& out);

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
// gate_up [..., 2 w], gates first -> [..., w].
at::Tensor silu_mul(const at::Tensor& gate_up);
// In place, the tanh form.
at::Tensor gelu_tanh_(const at::Tensor& x);

void check_element_type(const at::Tensor& x, const char* what);

// Calls f(item, thread) for items 0 .. count - 1, handed out one by one: items may differ in cost.
template <typename Function>
void for_each_item(int64_t count, const Function& f) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads <= 1 || at::in_parallel_region()) {
    for (int64_t item = 0; item < count; ++item) f(item, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(item, thread);
  });
}

// Memory of the calling thread that lives on from call to call, so that large calls do not fault it in each time.
// What one operator needs while it runs, and what a layer keeps between its operators, are two memories.
enum class Memory { kOperator, kLayer };
char* workspace(int64_t bytes, Memory which = Memory::kOperator);

}  // namespace mmserve
