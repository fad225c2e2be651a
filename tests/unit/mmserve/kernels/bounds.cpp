// Runs every kernel of every instruction set on buffers that touch an unreadable page, at their end and at their
// start: a read or write one byte outside ends the program. Built with the address and undefined-behaviour
// sanitizers besides (make sanitize), which see the kernels' own arrays.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "dispatch.h"

using namespace mmserve;

namespace {

std::mt19937 rng(0);
bool at_end = true;

int64_t pick(std::initializer_list<int64_t> choices) { return choices.begin()[rng() % choices.size()]; }

// `bytes` of memory between two pages that can not be touched, against the one that `at_end` says.
class Guarded {
 public:
  explicit Guarded(int64_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    inner_ = (bytes + page_ - 1) / page_ * page_ + (bytes == 0 ? page_ : 0);
    base_ = static_cast<char*>(mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page_, inner_, PROT_READ | PROT_WRITE)) std::abort();
    data_ = base_ + page_ + (at_end ? inner_ - bytes : 0);
  }
  ~Guarded() { munmap(base_, inner_ + 2 * page_); }
  Guarded(const Guarded&) = delete;
  char* data() const { return data_; }

 private:
  int64_t page_, inner_;
  char *base_, *data_;
};

struct Type {
  int64_t size;
  const Kernels* kernels;

  std::unique_ptr<Guarded> random(int64_t count) const {
    auto buffer = std::make_unique<Guarded>(count * size);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      const float x = normal(rng);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (size == 4) std::memcpy(buffer->data() + 4 * i, &bits, 4);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (size == 2) std::memcpy(buffer->data() + 2 * i, &half, 2);
    }
    return buffer;
  }
  std::unique_ptr<Guarded> empty(int64_t count) const { return std::make_unique<Guarded>(count * size); }
  void check_finite(const Guarded& buffer, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, buffer.data() + i * size, size);
      float x;
      std::memcpy(&x, &bits, 4);
      if (!std::isfinite(x)) {
        std::fprintf(stderr, "a result is not finite\n");
        std::exit(1);
      }
    }
  }
};

void linear(const Type& type) {
  const int64_t rows = 1 + rng() % kLinearRows, n = pick({1, 3, 16, 17, 40}), k = pick({2, 10, 32, 34, 100});
  auto x = type.random(rows * k), weight = type.random(n * k), bias = type.random(n), residual = type.random(rows * n);
  auto y = type.empty(rows * n);
  const bool more = rng() % 2;
  const LinearArgs args = {x->data(), weight->data(), more ? bias->data() : nullptr, more ? residual->data() : nullptr,
                           y->data(), rows, n, k, k, n};
  const int64_t cut = rng() % (n + 1);
  type.kernels->linear(args, 0, cut);
  type.kernels->linear(args, cut, n);
  type.check_finite(*y, rows * n);
}

void dense(const Type& type) {
  const int64_t rows = 1 + rng() % 150, n = pick({1, 3, 16, 47, 48, 60, 130}), k = pick({2, 10, 32, 34, 100, 300});
  auto x = type.random(rows * k), weight = type.random(n * k), bias = type.random(n), residual = type.random(rows * n);
  auto y = type.empty(rows * n);
  Guarded packed(type.kernels->dense_bytes(rows, k));
  const bool more = rng() % 2;
  const Activation activations[] = {Activation::kNone, Activation::kGeluTanh, Activation::kQuickGelu};
  const DenseArgs args = {x->data(), packed.data(), weight->data(), more ? bias->data() : nullptr,
                          more ? residual->data() : nullptr, y->data(), rows, n, k, k, n, activations[rng() % 3]};
  const int64_t cut = rng() % (n + 1);
  Guarded scratch(type.kernels->dense_scratch(k));
  const int64_t panels = type.kernels->dense_panels(rows), half = panels / 2;
  for (int64_t panel = 0; panel < panels; ++panel) type.kernels->dense_pack(args, panel);
  for (const auto& [first, last] : {std::pair{int64_t{0}, half}, std::pair{half, panels}}) {
    type.kernels->dense(args, first, last, 0, cut, scratch.data());
    type.kernels->dense(args, first, last, cut, n, scratch.data());
  }
  type.check_finite(*y, rows * n);
}

void small(const Type& type) {
  const int64_t width = pick({1, 2, 15, 16, 33, 576});
  auto x = type.random(width), y = type.random(width), out = type.empty(width);
  type.kernels->rms_norm(x->data(), y->data(), 1e-5f, out->data(), width);
  type.check_finite(*out, width);
  auto offset = type.random(width);
  type.kernels->layer_norm(x->data(), y->data(), offset->data(), 1e-5f, out->data(), width);
  type.check_finite(*out, width);
  type.kernels->silu_mul(x->data(), y->data(), out->data(), width);
  type.check_finite(*out, width);
  type.kernels->gelu_tanh(x->data(), out->data(), width);
  type.check_finite(*out, width);
  const int64_t d = 4 * (1 + rng() % 40);
  auto head = type.random(d), cos = type.random(d), sin = type.random(d);
  type.kernels->rotate(head->data(), cos->data(), sin->data(), head->data(), d);
  type.check_finite(*head, d);
}

void attention(const Type& type, bool single) {
  const int64_t d = pick({2, 32, 40, 64, 72, 256}), dv = pick({1, 9, 32, 64, 80, 256});
  const int64_t group = pick({1, 2, 3, 9}), kv_heads = pick({1, 2}), heads = group * kv_heads;
  const int64_t queries = single ? 1 : pick({1, 2, 17, 60});
  const int64_t keys = queries + pick({0, 1, 15, 63, 64, 300, 520}), block = pick({1, 5, 16, 64});
  const int64_t blocks = (keys + block - 1) / block;
  // The last block ends with the sequence's last key: what lies behind it must not be read.
  const int64_t slots = (blocks - 1) * block + (keys - 1) % block + 1;
  auto query = type.random(queries * heads * d), key = type.random(slots * kv_heads * d);
  auto value = type.random(slots * kv_heads * dv), out = type.empty(queries * heads * dv);
  Guarded table(blocks * 4), lo(queries * 4), hi(queries * 4);
  for (int32_t b = 0; b < blocks; ++b) std::memcpy(table.data() + 4 * b, &b, 4);
  for (int64_t q = 0; q < queries; ++q) {
    const int32_t last = static_cast<int32_t>(keys - queries + q), first = static_cast<int32_t>(rng() % (last + 1));
    const int32_t stop = last + 1;
    std::memcpy(lo.data() + 4 * q, &first, 4);
    std::memcpy(hi.data() + 4 * q, &stop, 4);
  }
  const AttentionArgs args = {query->data(), out->data(), reinterpret_cast<int32_t*>(lo.data()),
                              reinterpret_cast<int32_t*>(hi.data()), heads * d, d, heads * dv, dv, group, d, dv,
                              0.3f, rng() % 2 ? 5.0f : 0.0f};
  const KeySource source = {key->data(), value->data(), reinterpret_cast<int32_t*>(table.data()), block,
                            kv_heads * d, d, kv_heads * dv, dv};
  for (int64_t head = 0; head < kv_heads; ++head) {
    if (single) {
      std::vector<DecodeJob> jobs;
      const int64_t floats = group * (dv + 2), count = (keys + kDecodeSplit - 1) / kDecodeSplit;
      Guarded partials(floats * count * 4);
      for (int64_t k = 0; k < keys; k += kDecodeSplit)
        jobs.push_back({source, head, 0, k, std::min(keys, k + kDecodeSplit),
                        count == 1 ? nullptr : reinterpret_cast<float*>(partials.data()) + floats * (k / kDecodeSplit)});
      for (const DecodeJob& job : jobs) type.kernels->decode(args, job);
      if (count > 1) type.kernels->decode_merge(args, jobs.data(), count);
      continue;
    }
    const PackSizes sizes = type.kernels->flash_sizes(args, keys);
    Guarded packed_keys(sizes.key_bytes), packed_values(sizes.value_bytes);
    Guarded scratch(type.kernels->flash_scratch(args));
    const FlashJob job = {source, head, 0, queries, keys, packed_keys.data(), packed_values.data()};
    for (int64_t k = 0; k < keys; k += 2 * kPackStep)
      type.kernels->flash_pack(args, job, k, std::min(keys, k + 2 * kPackStep));
    for (int64_t r = 0; r < queries * group; r += kFlashRows)
      type.kernels->flash_rows(args, job, r, std::min(queries * group, r + kFlashRows), scratch.data());
  }
  type.check_finite(*out, queries * heads * dv);
}

}  // namespace

int main() {
  for (const std::string& name : available_instruction_sets()) {
    use_instruction_set(name);
    for (int round = 0; round < 150; ++round) {
      at_end = round % 2 == 0;
      for (const int64_t size : {2, 4}) {
        const Type type = {size, &kernels_for(static_cast<size_t>(size))};
        linear(type);
        dense(type);
        small(type);
        attention(type, true);
        attention(type, false);
      }
    }
    std::printf("%s: nothing outside its bounds\n", name.c_str());
  }
}
