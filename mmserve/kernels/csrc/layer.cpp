#include "layer.h"

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>

namespace mmserve {
namespace {

// Few rows at memory speed, many in tiles where those are the fastest here, else through torch's own products.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const MaybeTensor& residual) {
  if (x.size(0) <= kLinearRows) return linear(x, weight, bias, residual);
  if (dense_pays(x.size(0), x.element_size())) return dense(x, weight, bias, residual, "none");
  at::Tensor y = at::linear(x, weight, bias);
  if (residual) y.add_(*residual);
  return y;
}

}  // namespace

DecoderLayer::DecoderLayer(LayerWeights weights, int64_t heads, int64_t kv_heads, int64_t head_size, double scale,
                           double soft_cap, double input_eps, double middle_eps)
    : w_(std::move(weights)),
      heads_(heads),
      kv_heads_(kv_heads),
      head_size_(head_size),
      scale_(scale),
      soft_cap_(soft_cap),
      input_eps_(input_eps),
      middle_eps_(middle_eps) {
  const int64_t width = w_.input_norm.numel();
  TORCH_CHECK(w_.qkv.size(0) == (heads + 2 * kv_heads) * head_size && w_.qkv.size(1) == width, "qkv is ",
              w_.qkv.sizes());
  TORCH_CHECK(w_.output.size(0) == width && w_.output.size(1) == heads * head_size, "output is ", w_.output.sizes());
  TORCH_CHECK(w_.gate_up.size(1) == width && w_.gate_up.size(0) == 2 * w_.down.size(1) && w_.down.size(0) == width,
              "gate_up is ", w_.gate_up.sizes(), ", down ", w_.down.sizes());
  TORCH_CHECK(head_size % 4 == 0, "head size ", head_size, " can not be rotated by halves");
}

void DecoderLayer::check_rows(const at::Tensor& rows, const char* what) const {
  TORCH_CHECK(rows.dim() == 2 && rows.size(1) == w_.input_norm.numel() && rows.is_contiguous() &&
                  rows.scalar_type() == w_.qkv.scalar_type(), what, " must be a contiguous [T, width] of the weights' type");
}

at::Tensor DecoderLayer::attend(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                                const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                                const Batch& batch) const {
  const int64_t tokens = hidden.size(0);
  check_rows(hidden, "hidden");
  for (const at::Tensor* x : {&cos, &sin})
    TORCH_CHECK(x->dim() == 2 && x->size(0) == tokens && x->size(1) == head_size_ && x->is_contiguous() &&
                    x->scalar_type() == hidden.scalar_type(), "cos and sin must be contiguous [T, D]");

  const at::Tensor qkv = product(rms_norm(hidden, w_.input_norm, input_eps_), w_.qkv, w_.qkv_bias, {});
  const at::Tensor parts = qkv.view({tokens, heads_ + 2 * kv_heads_, head_size_});
  const Kernels& kernels = kernels_for(hidden.element_size());
  const int64_t row = head_size_ * static_cast<int64_t>(hidden.element_size());
  char* data = static_cast<char*>(parts.data_ptr());
  const char *cosines = static_cast<const char*>(cos.const_data_ptr()), *sines = static_cast<const char*>(sin.const_data_ptr());
  at::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads_ + kv_heads_; ++h) {
        char* head = data + (t * (heads_ + 2 * kv_heads_) + h) * row;
        kernels.rotate(head, cosines + t * row, sines + t * row, head, head_size_);
      }
  });
  write_cache(parts.narrow(1, heads_, kv_heads_), parts.narrow(1, heads_ + kv_heads_, kv_heads_), key_cache,
              value_cache, slots);
  return paged_attention(parts.narrow(1, 0, heads_), key_cache, value_cache, batch, scale_, soft_cap_)
      .view({tokens, heads_ * head_size_});
}

at::Tensor DecoderLayer::gated(const at::Tensor& middle) const {
  return silu_mul(product(rms_norm(middle, w_.middle_norm, middle_eps_), w_.gate_up, {}, {}));
}

at::Tensor DecoderLayer::forward(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                                 const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                                 const Batch& batch) const {
  const at::Tensor seen = attend(hidden, cos, sin, key_cache, value_cache, slots, batch);
  const at::Tensor middle = product(seen, w_.output, w_.output_bias, hidden);
  return product(gated(middle), w_.down, {}, middle);
}

at::Tensor DecoderLayer::attention_part(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                                        const at::Tensor& key_cache, const at::Tensor& value_cache,
                                        const at::Tensor& slots, const Batch& batch) const {
  return product(attend(hidden, cos, sin, key_cache, value_cache, slots, batch), w_.output, {}, {});
}

at::Tensor DecoderLayer::mlp_part(const at::Tensor& middle) const {
  check_rows(middle, "middle");
  return product(gated(middle), w_.down, {}, {});
}

}  // namespace mmserve
