// One layer of a vision tower in one call: norm, QKV, attention of everything to everything, output, norm, MLP.
#pragma once

#include "host.h"

namespace mmserve {

struct EncoderWeights {
  at::Tensor input_norm, input_norm_bias;    // [width]
  at::Tensor qkv, qkv_bias;                  // [3 H D, width], [3 H D]
  at::Tensor output, output_bias;            // [width, H D], [width]
  at::Tensor middle_norm, middle_norm_bias;  // [width]
  at::Tensor up, up_bias;                    // [inner, width], [inner]
  at::Tensor down, down_bias;                // [width, inner], [width]
};

class EncoderLayer {
 public:
  EncoderLayer(EncoderWeights weights, int64_t heads, double scale, double input_eps, double middle_eps,
               Activation activation);

  // hidden [B, S, width] -> [B, S, width]; images do not see each other.
  at::Tensor forward(const at::Tensor& hidden) const;

 private:
  void forward_one(const char* hidden, char* out, int64_t rows) const;

  EncoderWeights w_;
  int64_t heads_, head_size_, width_, inner_;
  double scale_, input_eps_, middle_eps_;
  Activation activation_;
};

}  // namespace mmserve
