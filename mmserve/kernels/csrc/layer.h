// One decoder layer of the Llama kind in one call: norm, QKV, rotary, cache, attention, output, norm, gated MLP.
#pragma once

#include "host.h"

namespace mmserve {

struct LayerWeights {
  at::Tensor input_norm;   // [width]
  at::Tensor qkv;          // [(H + 2 K) D, width]
  MaybeTensor qkv_bias;    // [(H + 2 K) D]
  at::Tensor output;       // [width, H D]
  MaybeTensor output_bias; // [width]
  at::Tensor middle_norm;  // [width]
  at::Tensor gate_up;      // [2 inner, width]
  at::Tensor down;         // [width, inner]
};

class DecoderLayer {
 public:
  DecoderLayer(LayerWeights weights, int64_t heads, int64_t kv_heads, int64_t head_size, double scale, double soft_cap,
               double input_eps, double middle_eps);

  // hidden [T, width], cos and sin [T, D], slots int64 [T] -> [T, width]; the batch's keys and values are written.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                     const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                     const Batch& batch) const;

  // Its two halves, of a layer that ranks share: what this rank's weights add to their sum [T, width], without the
  // half's input and the output bias, which come on top of the sum once.
  at::Tensor attention_part(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                            const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                            const Batch& batch) const;
  at::Tensor mlp_part(const at::Tensor& middle) const;

 private:
  void check_rows(const at::Tensor& rows, const char* what) const;
  at::Tensor attend(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                    const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                    const Batch& batch) const;  // [T, H D], before the output projection
  at::Tensor gated(const at::Tensor& middle) const;  // [T, inner], before the last projection

  LayerWeights w_;
  int64_t heads_, kv_heads_, head_size_;
  double scale_, soft_cap_, input_eps_, middle_eps_;
};

}  // namespace mmserve
