// Few-row products and the small row-wise operations.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "host.h"

namespace mmserve {

void check_element_type(const at::Tensor& x, const char* what) {
  TORCH_CHECK(x.device().is_cpu(), what, " is on ", x.device(), ", not on the CPU");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat, what, " is ", x.scalar_type(),
              ", neither bfloat16 nor float32");
}

namespace {

const void* data_or_null(const MaybeTensor& x) { return x ? x->const_data_ptr() : nullptr; }

void check_same(const MaybeTensor& x, const at::Tensor& like, at::IntArrayRef shape, const char* what) {
  if (!x) return;
  TORCH_CHECK(x->scalar_type() == like.scalar_type() && x->sizes() == shape && x->is_contiguous(), what,
              " must be a contiguous ", like.scalar_type(), " of shape ", shape);
}

void check_product(const at::Tensor& x, const at::Tensor& weight) {
  check_element_type(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x must be [rows, k], its rows dense");
  const int64_t k = x.size(1);
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == k && weight.is_contiguous(), "weight must be a contiguous [n, ", k,
              "]");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight is ", weight.scalar_type(), ", x ", x.scalar_type());
  TORCH_CHECK(k * x.element_size() % 4 == 0, "k must be even for bfloat16");
}

// Each row of x through f(kernels, from, to, width).
template <typename Function>
at::Tensor rows_mapped(const at::Tensor& x, const Function& f) {
  check_element_type(x, "x");
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  at::Tensor out = at::empty_like(x);
  const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  const int64_t bytes = width * static_cast<int64_t>(x.element_size());
  const Kernels& kernels = kernels_for(x.element_size());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(kernels, from + row * bytes, to + row * bytes, width);
  });
  return out;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const MaybeTensor& residual) {
  check_product(x, weight);
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  TORCH_CHECK(rows <= kLinearRows, "x must be [rows <= ", kLinearRows, ", k]");
  check_same(bias, x, {n}, "bias");
  check_same(residual, x, {rows, n}, "residual");
  at::Tensor y = at::empty({rows, n}, x.options());
  if (y.numel() == 0) return y;

  if (linear_is_dense(x.element_size())) {
    run_dense(kernels_for(x.element_size()),
              {x.const_data_ptr(), nullptr, weight.const_data_ptr(), data_or_null(bias), data_or_null(residual),
               y.data_ptr(), rows, n, k, x.stride(0), n, Activation::kNone},
              static_cast<int64_t>(x.element_size()));
    return y;
  }
  const LinearArgs args = {x.const_data_ptr(), weight.const_data_ptr(), data_or_null(bias), data_or_null(residual),
                           y.data_ptr(),       rows, n, k, x.stride(0), n};
  const Kernels& kernels = kernels_for(x.element_size());
  // Ranges of about 64 KB of weight: long runs for the prefetchers, short enough to come out even over threads.
  const int64_t step = std::max<int64_t>(16, (65536 / (k * static_cast<int64_t>(x.element_size()))) / 16 * 16);
  for_each_item((n + step - 1) / step,
                [&](int64_t item, int64_t) { kernels.linear(args, item * step, std::min(n, (item + 1) * step)); });
  return y;
}

Activation activation_named(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  TORCH_CHECK_VALUE(false, "there is no activation '", name, "': none, gelu_tanh, quick_gelu");
}

void run_dense(const Kernels& kernels, DenseArgs args, int64_t element_size) {
  const int64_t packed = (kernels.dense_bytes(args.rows, args.k) + 63) / 64 * 64, scratch = kernels.dense_scratch(args.k);
  char* const memory = workspace(packed + scratch * at::get_num_threads());
  args.packed = memory;
  const int64_t panels = kernels.dense_panels(args.rows);
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) kernels.dense_pack(args, panel);
  });
  // A few panels and a band of weight rows are an item, so that threads come out even; items that share what stays
  // in a core's own cache follow each other.
  const DenseBlock block = kernels.dense_block(args.k);
  const bool few = args.rows <= kLinearRows;
  const int64_t columns = few ? kDenseColumns : kBandColumns, band_bytes = few ? 64 << 10 : 256 << 10;
  const int64_t band = std::max<int64_t>(1, band_bytes / (args.k * element_size) / columns) * columns;
  const int64_t runs = (panels + block.panels - 1) / block.panels, bands = (args.n + band - 1) / band;
  for_each_item(bands * runs, [&](int64_t item, int64_t thread) {
    const int64_t n = (block.rows_stay ? item % bands : item / runs) * band;
    const int64_t first = (block.rows_stay ? item / bands : item % runs) * block.panels;
    kernels.dense(args, first, std::min(panels, first + block.panels), n, std::min(args.n, n + band),
                  memory + packed + thread * scratch);
  });
}

at::Tensor dense(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const MaybeTensor& residual,
                 const std::string& activation) {
  check_product(x, weight);
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  check_same(bias, x, {n}, "bias");
  check_same(residual, x, {rows, n}, "residual");
  at::Tensor y = at::empty({rows, n}, x.options());
  if (y.numel() == 0) return y;
  run_dense(kernels_for(x.element_size()),
            {x.const_data_ptr(), nullptr, weight.const_data_ptr(), data_or_null(bias), data_or_null(residual),
             y.data_ptr(), rows, n, k, x.stride(0), n, activation_named(activation)},
            static_cast<int64_t>(x.element_size()));
  return y;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  check_same(weight, x, {x.size(-1)}, "weight");
  check_same(bias, x, {x.size(-1)}, "bias");
  return rows_mapped(x, [&](const Kernels& kernels, const char* from, char* to, int64_t width) {
    kernels.layer_norm(from, weight.const_data_ptr(), bias.const_data_ptr(), static_cast<float>(eps), to, width);
  });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_same(weight, x, {x.size(-1)}, "weight");
  return rows_mapped(x, [&](const Kernels& kernels, const char* from, char* to, int64_t width) {
    kernels.rms_norm(from, weight.const_data_ptr(), static_cast<float>(eps), to, width);
  });
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  check_element_type(gate_up, "gate_up");
  TORCH_CHECK(gate_up.is_contiguous() && gate_up.size(-1) % 2 == 0, "gate_up must be a contiguous [..., 2 w]");
  const int64_t width = gate_up.size(-1) / 2, rows = width ? gate_up.numel() / (2 * width) : 0;
  auto shape = gate_up.sizes().vec();
  shape.back() = width;
  at::Tensor out = at::empty(shape, gate_up.options());
  const int64_t bytes = width * static_cast<int64_t>(gate_up.element_size());
  const Kernels& kernels = kernels_for(gate_up.element_size());
  const char* from = static_cast<const char*>(gate_up.const_data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels.silu_mul(from + row * 2 * bytes, from + row * 2 * bytes + bytes, to + row * bytes, width);
  });
  return out;
}

at::Tensor gelu_tanh_(const at::Tensor& x) {
  check_element_type(x, "x");
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  const Kernels& kernels = kernels_for(x.element_size());
  char* at = static_cast<char*>(x.data_ptr());
  const int64_t size = static_cast<int64_t>(x.element_size());
  at::parallel_for(0, x.numel(), 16384, [&](int64_t begin, int64_t end) {
    kernels.gelu_tanh(at + begin * size, at + begin * size, end - begin);
  });
  return x;
}

}  // namespace mmserve
