// The Python face. Every call that computes lets go of the interpreter's lock.
#include <torch/csrc/utils/pybind.h>

#include "encoder.h"
#include "exchange.h"
#include "layer.h"

namespace py = pybind11;
using namespace mmserve;
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace {

// A layer's method that goes by the cache, with the batch's tensors one by one.
auto over_cache(at::Tensor (DecoderLayer::*method)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                   const Batch&) const) {
  return [method](const DecoderLayer& layer, const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                  at::Tensor cu_seqlens_q, at::Tensor key_lens, at::Tensor block_tables, at::Tensor lo,
                  at::Tensor hi) {
    return (layer.*method)(hidden, cos, sin, key_cache, value_cache, slots,
                           {cu_seqlens_q, key_lens, block_tables, lo, hi});
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("available_instruction_sets", &available_instruction_sets);
  m.def("active_instruction_set", &active_instruction_set);
  m.def("use_instruction_set", &use_instruction_set);
  m.def("missing_instruction_set", &missing_instruction_set);
  m.attr("most_linear_rows") = kLinearRows;

  m.def("linear", &linear, Unlocked());
  m.def("dense", &dense, Unlocked());
  m.def("dense_pays", &dense_pays);
  m.def("encoder_pays", &encoder_pays);
  m.def("attention_pays", &attention_pays);
  m.def("layer_norm", &layer_norm, Unlocked());
  m.def("rms_norm", &rms_norm, Unlocked());
  m.def("silu_mul", &silu_mul, Unlocked());
  m.def("gelu_tanh_", &gelu_tanh_, Unlocked());
  m.def("write_cache", &write_cache, Unlocked());
  m.def("full_attention", &full_attention, Unlocked());
  m.def(
      "paged_attention",
      [](const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache, at::Tensor cu_seqlens_q,
         at::Tensor key_lens, at::Tensor block_tables, at::Tensor lo, at::Tensor hi, double scale, double soft_cap) {
        return paged_attention(query, key_cache, value_cache, {cu_seqlens_q, key_lens, block_tables, lo, hi}, scale,
                               soft_cap);
      },
      Unlocked());

  py::class_<DecoderLayer, std::shared_ptr<DecoderLayer>>(m, "DecoderLayer")
      .def(py::init([](at::Tensor input_norm, at::Tensor qkv, MaybeTensor qkv_bias, at::Tensor output,
                       MaybeTensor output_bias, at::Tensor middle_norm, at::Tensor gate_up, at::Tensor down,
                       int64_t heads, int64_t kv_heads, int64_t head_size, double scale, double soft_cap,
                       double input_eps, double middle_eps) {
        return new DecoderLayer({input_norm, qkv, qkv_bias, output, output_bias, middle_norm, gate_up, down}, heads,
                                kv_heads, head_size, scale, soft_cap, input_eps, middle_eps);
      }))
      .def("forward", over_cache(&DecoderLayer::forward), Unlocked())
      .def("attention_part", over_cache(&DecoderLayer::attention_part), Unlocked())
      .def("mlp_part", &DecoderLayer::mlp_part, Unlocked());

  py::class_<EncoderLayer, std::shared_ptr<EncoderLayer>>(m, "EncoderLayer")
      .def(py::init([](at::Tensor input_norm, at::Tensor input_norm_bias, double input_eps, at::Tensor qkv,
                       at::Tensor qkv_bias, at::Tensor output, at::Tensor output_bias, at::Tensor middle_norm,
                       at::Tensor middle_norm_bias, double middle_eps, at::Tensor up, at::Tensor up_bias,
                       at::Tensor down, at::Tensor down_bias, int64_t heads, double scale,
                       const std::string& activation) {
        return new EncoderLayer({input_norm, input_norm_bias, qkv, qkv_bias, output, output_bias, middle_norm,
                                 middle_norm_bias, up, up_bias, down, down_bias},
                                heads, scale, input_eps, middle_eps, activation_named(activation));
      }))
      .def("forward", &EncoderLayer::forward, Unlocked());

  py::class_<SharedExchange>(m, "SharedExchange")
      .def(py::init([](int memory, int64_t rank, int64_t size, const std::vector<int>& peers, double timeout) {
        auto exchange = std::make_unique<SharedExchange>(memory, rank, size, peers, timeout);
        exchange->while_waiting = [] {  // Ctrl-C, where it is this thread's to handle
          py::gil_scoped_acquire locked;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        };
        return exchange;
      }))
      .def_static("bytes", &SharedExchange::bytes)
      .def("sum", &SharedExchange::sum, py::arg("tensor"), py::arg("onto") = py::none(), Unlocked())
      .def("gather", &SharedExchange::gather, Unlocked())
      .def("broadcast", &SharedExchange::broadcast, Unlocked())
      .def("leave", &SharedExchange::leave);

  // Layers one after the other; each has its own cache and intervals.
  m.def(
      "decoder_layers",
      [](const std::vector<std::shared_ptr<DecoderLayer>>& layers, at::Tensor hidden, const at::Tensor& cos,
         const at::Tensor& sin, const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
         const at::Tensor& slots, at::Tensor cu_seqlens_q, at::Tensor key_lens, at::Tensor block_tables,
         const std::vector<at::Tensor>& lo, const std::vector<at::Tensor>& hi) {
        for (size_t size : {keys.size(), values.size(), lo.size(), hi.size()})
          TORCH_CHECK(size == layers.size(), "there are ", layers.size(), " layers, but ", size, " of what goes with them");
        for (size_t i = 0; i < layers.size(); ++i)
          hidden = layers[i]->forward(hidden, cos, sin, keys[i], values[i], slots,
                                      {cu_seqlens_q, key_lens, block_tables, lo[i], hi[i]});
        return hidden;
      },
      Unlocked());
}
