// Attention on tensors: the cache written and read in pages, and full attention for vision towers.
//
// Sequences with one query go through decode jobs, all others through flash jobs, each in as many items as
// keep the threads busy. Packed keys and values of flash jobs are made for as many (sequence, key head)
// pairs at once as fit a budget, so that a long prompt's do not take memory by the gigabyte.
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <vector>

#include "host.h"

namespace mmserve {
namespace {

constexpr int64_t kPackedBytes = 4 << 20;  // stays in a shared cache

int64_t ceil_to(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct Free {
  void operator()(char* p) const { std::free(p); }
};

// Items of equal standing: a range of a job's rows or keys.
struct Item {
  int64_t job, begin, end;
};

class FlashRun {
 public:
  FlashRun(const Kernels& kernels, const AttentionArgs& args) : kernels_(kernels), args_(args) {}

  void add(const FlashJob& job) {
    const PackSizes sizes = kernels_.flash_sizes(args_, job.num_keys);
    const int64_t bytes = ceil_to(sizes.key_bytes, 64) + ceil_to(sizes.value_bytes, 64);
    if (!jobs_.empty() && packed_ + bytes > kPackedBytes) run();
    jobs_.push_back(job);
    packed_ += bytes;
  }

  void run() {
    if (jobs_.empty()) return;
    const int64_t scratch = ceil_to(kernels_.flash_scratch(args_), 64);
    char* at = workspace(packed_ + scratch * at::get_num_threads());
    char* scratches = at + packed_;
    std::vector<Item> packs, rows;
    for (size_t j = 0; j < jobs_.size(); ++j) {
      FlashJob& job = jobs_[j];
      const PackSizes sizes = kernels_.flash_sizes(args_, job.num_keys);
      job.keys = at;
      job.values = at += ceil_to(sizes.key_bytes, 64);
      at += ceil_to(sizes.value_bytes, 64);
      for (int64_t k = 0; k < job.num_keys; k += 4 * kPackStep)
        packs.push_back({static_cast<int64_t>(j), k, std::min(job.num_keys, k + 4 * kPackStep)});
      // The last rows of a causal prompt see the most keys: first, so that the end comes out even.
      const int64_t all = job.num_tokens * args_.group;
      for (int64_t r = (all - 1) / kFlashRows * kFlashRows; r >= 0; r -= kFlashRows)
        rows.push_back({static_cast<int64_t>(j), r, std::min(all, r + kFlashRows)});
    }
    for_each_item(static_cast<int64_t>(packs.size()), [&](int64_t i, int64_t) {
      kernels_.flash_pack(args_, jobs_[packs[i].job], packs[i].begin, packs[i].end);
    });
    for_each_item(static_cast<int64_t>(rows.size()), [&](int64_t i, int64_t thread) {
      kernels_.flash_rows(args_, jobs_[rows[i].job], rows[i].begin, rows[i].end, scratches + thread * scratch);
    });
    jobs_.clear();
    packed_ = 0;
  }

 private:
  const Kernels& kernels_;
  const AttentionArgs& args_;
  std::vector<FlashJob> jobs_;
  int64_t packed_ = 0;
};

void run_decode(const Kernels& kernels, const AttentionArgs& args, std::vector<DecodeJob>& jobs) {
  if (jobs.empty()) return;
  // Jobs of one (sequence, key head) stand together; those in several splits leave partial results to merge.
  std::vector<Item> merges;
  int64_t floats = 0;
  for (size_t i = 0; i < jobs.size();) {
    size_t j = i + 1;
    while (j < jobs.size() && jobs[j].token == jobs[i].token && jobs[j].kv_head == jobs[i].kv_head) ++j;
    if (j - i > 1) merges.push_back({0, static_cast<int64_t>(i), static_cast<int64_t>(j)});
    i = j;
  }
  const int64_t partial = args.group * (args.dv + 2);
  for (const Item& merge : merges) floats += (merge.end - merge.begin) * partial;
  float* at = reinterpret_cast<float*>(workspace(floats * 4));
  for (const Item& merge : merges)
    for (int64_t i = merge.begin; i < merge.end; ++i, at += partial) jobs[i].partial = at;
  for_each_item(static_cast<int64_t>(jobs.size()), [&](int64_t i, int64_t) { kernels.decode(args, jobs[i]); });
  for_each_item(static_cast<int64_t>(merges.size()), [&](int64_t i, int64_t) {
    kernels.decode_merge(args, &jobs[merges[i].begin], merges[i].end - merges[i].begin);
  });
}

void check_int32(const at::Tensor& x, const char* what) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.is_contiguous() && x.device().is_cpu(), what,
              " must be a contiguous int32 tensor on the CPU");
}

}  // namespace

char* workspace(int64_t bytes, Memory which) {
  thread_local std::unique_ptr<char[], Free> memories[2];
  thread_local int64_t sizes[2] = {0, 0};
  auto& memory = memories[static_cast<int>(which)];
  int64_t& size = sizes[static_cast<int>(which)];
  if (bytes > size) {
    memory.reset();
    size = 0;
    const int64_t rounded = ceil_to(bytes, 4096);
    memory.reset(static_cast<char*>(std::aligned_alloc(4096, rounded)));
    TORCH_CHECK(memory != nullptr, "no memory for a workspace of ", rounded, " bytes");
    size = rounded;
  }
  return memory.get();
}

void write_cache(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                 const at::Tensor& value_cache, const at::Tensor& slots) {
  const int64_t tokens = key.size(0);
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.numel() == tokens,
              "slots must be a contiguous int64 [", tokens, "]");
  const std::pair<const at::Tensor*, const at::Tensor*> both[] = {{&key, &key_cache}, {&value, &value_cache}};
  for (const auto& [from, to] : both) {
    check_element_type(*from, "key or value");
    TORCH_CHECK(from->scalar_type() == to->scalar_type(), "the cache is ", to->scalar_type(), ", not ",
                from->scalar_type());
    TORCH_CHECK(to->dim() == 4 && to->is_contiguous() && from->dim() == 3 && from->stride(2) == 1 &&
                    from->size(0) == tokens && from->size(1) == to->size(2) && from->size(2) == to->size(3),
                "key and value [T, K, D] must fit a contiguous cache [N, B, K, D]");
  }
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t size = static_cast<int64_t>(key.element_size());
  const int64_t num_slots = key_cache.size(0) * key_cache.size(1);
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_INDEX(slot[t] >= 0 && slot[t] < num_slots, "slot ", slot[t], " is not in a cache of ", num_slots);
  for (const auto& [from, to] : both) {
    const int64_t heads = from->size(1), bytes = from->size(2) * size;
    const char* source = static_cast<const char*>(from->const_data_ptr());
    char* target = static_cast<char*>(to->data_ptr());
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(target + (slot[t] * heads + h) * bytes,
                    source + (t * from->stride(0) + h * from->stride(1)) * size, bytes);
  }
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const Batch& batch, double scale, double soft_cap) {
  check_element_type(query, "query");
  TORCH_CHECK(key_cache.scalar_type() == query.scalar_type() && value_cache.scalar_type() == query.scalar_type(),
              "query, key and value differ in type");
  TORCH_CHECK(query.dim() == 3 && query.stride(2) == 1, "query must be [T, H, D]");
  TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4 && key_cache.is_contiguous() &&
                  value_cache.is_contiguous(), "the cache must be contiguous [N, B, K, D]");
  const int64_t tokens = query.size(0), heads = query.size(1), d = query.size(2);
  const int64_t kv_heads = key_cache.size(2), dv = value_cache.size(3), block_size = key_cache.size(1);
  TORCH_CHECK(key_cache.size(3) == d && heads % kv_heads == 0 && value_cache.size(2) == kv_heads &&
                  value_cache.size(0) == key_cache.size(0) && value_cache.size(1) == block_size,
              "query ", query.sizes(), " does not fit the cache ", key_cache.sizes(), ", ", value_cache.sizes());
  TORCH_CHECK(d * query.element_size() % 4 == 0 && d <= 512 && dv <= 512, "head sizes must be even and at most 512");
  for (const at::Tensor* x : {&batch.cu_seqlens_q, &batch.key_lens, &batch.block_tables, &batch.lo, &batch.hi})
    check_int32(*x, "metadata");
  const int64_t sequences = batch.key_lens.numel(), width = batch.block_tables.size(1);
  TORCH_CHECK(batch.cu_seqlens_q.numel() == sequences + 1 && batch.lo.numel() == tokens && batch.hi.numel() == tokens &&
                  batch.block_tables.size(0) == sequences, "metadata does not fit the batch");
  at::Tensor out = at::empty({tokens, heads, dv}, query.options());
  if (tokens == 0) return out;

  const int32_t* cu = batch.cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* key_lens = batch.key_lens.const_data_ptr<int32_t>();
  const int32_t* tables = batch.block_tables.const_data_ptr<int32_t>();
  const AttentionArgs args = {query.const_data_ptr(), out.data_ptr(),
                              batch.lo.const_data_ptr<int32_t>(), batch.hi.const_data_ptr<int32_t>(),
                              query.stride(0), query.stride(1), heads * dv, dv, heads / kv_heads, d, dv,
                              static_cast<float>(scale), static_cast<float>(soft_cap)};
  const Kernels& kernels = kernels_for(query.element_size());
  FlashRun flash(kernels, args);
  std::vector<DecodeJob> decodes;
  TORCH_CHECK(cu[0] == 0 && cu[sequences] == tokens, "cu_seqlens_q does not add up to the tokens");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t queries = cu[s + 1] - cu[s], keys = key_lens[s];
    if (queries <= 0) continue;
    TORCH_CHECK(keys >= queries && (keys + block_size - 1) / block_size <= width, "sequence ", s, " of ", keys,
                " keys does not fit its block table");
    for (int64_t b = 0; b < (keys + block_size - 1) / block_size; ++b)
      TORCH_CHECK_INDEX(tables[s * width + b] >= 0 && tables[s * width + b] < key_cache.size(0), "block ",
                        tables[s * width + b], " is not in a cache of ", key_cache.size(0));
    const KeySource source = {key_cache.const_data_ptr(), value_cache.const_data_ptr(), tables + s * width, block_size,
                              kv_heads * d, d, kv_heads * dv, dv};
    for (int64_t h = 0; h < kv_heads; ++h) {
      if (queries > 1) {
        flash.add({source, h, cu[s], queries, keys, nullptr, nullptr});
        continue;
      }
      const int64_t lo = args.lo[cu[s]], hi = std::min<int64_t>(args.hi[cu[s]], keys);
      TORCH_CHECK(lo >= 0 && lo < hi, "a query must see a key");
      for (int64_t k = lo; k < hi; k += kDecodeSplit)
        decodes.push_back({source, h, cu[s], k, std::min(hi, k + kDecodeSplit), nullptr});
    }
  }
  flash.run();
  run_decode(kernels, args, decodes);
  return out;
}

at::Tensor full_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale) {
  TORCH_CHECK(query.dim() == 4 && value.dim() == 4, "query, key and value must be [B, H, S, D]");
  at::Tensor out = at::empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options());
  full_attention_into(query, key, value, scale, out);
  return out;
}

void full_attention_into(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale,
                         at::Tensor& out) {
  check_element_type(query, "query");
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "query, key and value must be [B, H, S, D]");
  TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(),
              "query, key and value differ in type");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), d = query.size(3);
  const int64_t kv_heads = key.size(1), keys = key.size(2), dv = value.size(3);
  TORCH_CHECK(key.size(0) == batch && value.size(0) == batch && value.size(1) == kv_heads && value.size(2) == keys &&
                  key.size(3) == d && kv_heads > 0 && heads % kv_heads == 0 && keys > 0,
              "query ", query.sizes(), ", key ", key.sizes(), " and value ", value.sizes(), " do not fit");
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "the last dimension must be dense");
  TORCH_CHECK(d * query.element_size() % 4 == 0 && d <= 512 && dv <= 512, "head sizes must be even and at most 512");
  TORCH_CHECK(out.is_contiguous() && out.sizes() == at::IntArrayRef({batch, queries, heads, dv}) &&
                  out.scalar_type() == query.scalar_type(), "out is ", out.sizes());
  if (out.numel() == 0) return;
  const int64_t size = static_cast<int64_t>(query.element_size());
  const Kernels& kernels = kernels_for(query.element_size());
  // Queries of image b are "tokens" b * tokens_apart ...: one set of strides serves the whole batch if it can.
  for (int64_t b0 = 0; b0 < batch;) {
    const int64_t q_token = query.stride(2);
    const bool packed = q_token > 0 && query.stride(0) == queries * q_token;
    const int64_t count = packed ? batch : 1;
    const AttentionArgs args = {static_cast<const char*>(query.const_data_ptr()) + b0 * query.stride(0) * size,
                                static_cast<char*>(out.data_ptr()) + b0 * queries * heads * dv * size,
                                nullptr, nullptr, q_token, query.stride(1), heads * dv, dv, heads / kv_heads, d, dv,
                                static_cast<float>(scale), 0.0f};
    FlashRun flash(kernels, args);
    for (int64_t b = 0; b < count; ++b) {
      const KeySource source = {static_cast<const char*>(key.const_data_ptr()) + (b0 + b) * key.stride(0) * size,
                                static_cast<const char*>(value.const_data_ptr()) + (b0 + b) * value.stride(0) * size,
                                nullptr, 1, key.stride(2), key.stride(1), value.stride(2), value.stride(1)};
      for (int64_t h = 0; h < kv_heads; ++h) flash.add({source, h, b * queries, queries, keys, nullptr, nullptr});
    }
    flash.run();
    b0 += count;
  }
}

}  // namespace mmserve
