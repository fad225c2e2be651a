#include "encoder.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

namespace mmserve {
namespace {

void check_fits(const at::Tensor& weight, at::IntArrayRef shape, const at::Tensor& like, const char* what) {
  TORCH_CHECK(weight.sizes() == shape && weight.is_contiguous() && weight.scalar_type() == like.scalar_type(), what,
              " is ", weight.sizes(), " of ", weight.scalar_type(), ", not ", shape, " of ", like.scalar_type());
}

void norm_rows(const Kernels& kernels, const char* x, const at::Tensor& weight, const at::Tensor& bias, double eps,
               char* out, int64_t rows, int64_t width, int64_t size) {
  const int64_t step = width * size;
  at::parallel_for(0, rows, 32, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels.layer_norm(x + row * step, weight.const_data_ptr(), bias.const_data_ptr(), static_cast<float>(eps),
                         out + row * step, width);
  });
}

}  // namespace

EncoderLayer::EncoderLayer(EncoderWeights weights, int64_t heads, double scale, double input_eps, double middle_eps,
                           Activation activation)
    : w_(std::move(weights)),
      heads_(heads),
      width_(w_.input_norm.numel()),
      inner_(w_.up.size(0)),
      scale_(scale),
      input_eps_(input_eps),
      middle_eps_(middle_eps),
      activation_(activation) {
  check_element_type(w_.input_norm, "input_norm");
  TORCH_CHECK(heads > 0 && w_.qkv.size(0) % (3 * heads) == 0, "qkv is ", w_.qkv.sizes(), " for ", heads, " heads");
  head_size_ = w_.qkv.size(0) / (3 * heads);
  const int64_t all = heads * head_size_;
  TORCH_CHECK(head_size_ % 2 == 0 && width_ % 2 == 0 && inner_ % 2 == 0, "widths must be even");
  const at::Tensor& like = w_.input_norm;
  for (const at::Tensor* vector : {&w_.input_norm_bias, &w_.output_bias, &w_.middle_norm, &w_.middle_norm_bias,
                                   &w_.down_bias})
    check_fits(*vector, {width_}, like, "a norm or bias");
  check_fits(w_.qkv, {3 * all, width_}, like, "qkv");
  check_fits(w_.qkv_bias, {3 * all}, like, "qkv_bias");
  check_fits(w_.output, {width_, all}, like, "output");
  check_fits(w_.up, {inner_, width_}, like, "up");
  check_fits(w_.up_bias, {inner_}, like, "up_bias");
  check_fits(w_.down, {width_, inner_}, like, "down");
}

at::Tensor EncoderLayer::forward(const at::Tensor& hidden) const {
  TORCH_CHECK(hidden.dim() == 3 && hidden.size(2) == width_ && hidden.is_contiguous() &&
                  hidden.scalar_type() == w_.qkv.scalar_type(), "hidden must be a contiguous [B, S, ", width_,
              "] of the weights' type");
  at::Tensor out = at::empty_like(hidden);
  const int64_t step = hidden.size(1) * width_ * static_cast<int64_t>(hidden.element_size());
  for (int64_t b = 0; b < hidden.size(0) && step > 0; ++b)
    forward_one(static_cast<const char*>(hidden.const_data_ptr()) + b * step,
                static_cast<char*>(out.data_ptr()) + b * step, hidden.size(1));
  return out;
}

void EncoderLayer::forward_one(const char* hidden, char* out, int64_t rows) const {
  const int64_t size = static_cast<int64_t>(w_.qkv.element_size()), all = heads_ * head_size_;
  const Kernels& kernels = kernels_for(size);
  const int64_t narrow = rows * std::max(width_, all) * size, wide = rows * std::max(3 * all, inner_) * size;
  char* const normed = workspace(2 * narrow + wide, Memory::kLayer);  // a norm's rows, then those of the attention
  char* const middle = normed + narrow;                               // after the attention
  char* const broad = middle + narrow;                                // queries, keys and values, then the MLP's inside
  const auto product = [&](const char* x, int64_t k, const at::Tensor& weight, const at::Tensor& bias,
                           const char* residual, char* y, Activation activation) {
    const int64_t n = weight.size(0);
    run_dense(kernels, {x, nullptr, weight.const_data_ptr(), bias.const_data_ptr(), residual, y, rows, n, k, k, n,
                        activation}, size);
  };

  norm_rows(kernels, hidden, w_.input_norm, w_.input_norm_bias, input_eps_, normed, rows, width_, size);
  product(normed, width_, w_.qkv, w_.qkv_bias, nullptr, broad, Activation::kNone);
  const auto part = [&](int64_t which) {
    return at::from_blob(broad + which * all * size, {1, heads_, rows, head_size_}, {0, head_size_, 3 * all, 1},
                         w_.qkv.options());
  };
  at::Tensor seen = at::from_blob(normed, {1, rows, heads_, head_size_}, w_.qkv.options());
  full_attention_into(part(0), part(1), part(2), scale_, seen);
  product(normed, all, w_.output, w_.output_bias, hidden, middle, Activation::kNone);
  norm_rows(kernels, middle, w_.middle_norm, w_.middle_norm_bias, middle_eps_, normed, rows, width_, size);
  product(normed, width_, w_.up, w_.up_bias, nullptr, broad, activation_);
  product(broad, inner_, w_.down, w_.down_bias, middle, out, Activation::kNone);
}

}  // namespace mmserve
