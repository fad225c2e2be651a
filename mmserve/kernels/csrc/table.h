// The kernels of one instruction set. Included once by each isa_*.cpp, inside its namespace and target.
#pragma once

template <typename T>
static Kernels kernels() {
  return {linear<T>,     dense_panels,     dense_bytes<T>, dense_pack<T>, dense_block, dense_scratch,   dense<T>,
          flash_sizes<T>, flash_pack<T>,    flash_scratch<T>, flash_rows<T>, decode<T>,      decode_merge<T>,
          rms_norm<T>,    layer_norm<T>,    silu_mul<T>,    gelu_tanh<T>,  rotate<T>,      sum<T>};
}
