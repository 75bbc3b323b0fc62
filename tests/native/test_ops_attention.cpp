// Paged attention, for every instruction set of the host, against a double-precision softmax.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "ops_support.h"

using namespace ft;
using ops_support::all_kernels;
using ops_support::pools;
using ops_support::random_floats;

namespace {
const float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  std::int64_t q_heads, kv_heads, dim, page_tokens, window;
  bool has_sinks = false;
};

// Sequences whose pages lie shuffled in the caches. Whatever no position owns is NaN.
struct Cache {
  Shape shape;
  std::int64_t max_pages;
  std::vector<float> k, v, sinks;
  std::vector<std::int32_t> table;

  Cache(const Shape& s, const std::vector<std::int64_t>& lengths, unsigned seed) : shape(s) {
    if (s.has_sinks) sinks = random_floats(s.q_heads, seed + 77, 2.0f);
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    const std::int64_t sequences = static_cast<std::int64_t>(lengths.size());
    max_pages = (longest + s.page_tokens - 1) / s.page_tokens;
    std::vector<std::int32_t> pages(static_cast<std::size_t>(sequences * max_pages));
    std::iota(pages.begin(), pages.end(), 1);   // page 0 is reserved
    std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
    table = pages;
    const std::int64_t row = s.kv_heads * s.dim;
    k.assign(static_cast<std::size_t>((sequences * max_pages + 1) * s.page_tokens * row), kNaN);
    v = k;
    for (std::int64_t q = 0; q < sequences; ++q) {
      const std::vector<float> ks = random_floats(lengths[q] * row, seed + 2 * static_cast<unsigned>(q));
      const std::vector<float> vs = random_floats(lengths[q] * row, seed + 2 * static_cast<unsigned>(q) + 1);
      for (std::int64_t p = 0; p < lengths[q]; ++p) {
        std::copy_n(&ks[p * row], row, &k[at(q, p) * row]);
        std::copy_n(&vs[p * row], row, &v[at(q, p) * row]);
      }
    }
  }

  std::int64_t at(std::int64_t sequence, std::int64_t position) const {
    return table[sequence * max_pages + position / shape.page_tokens] * shape.page_tokens +
           position % shape.page_tokens;
  }
};

struct Queries {
  std::vector<std::int32_t> sequence, positions;
  std::vector<float> q;
  std::int64_t tokens() const { return static_cast<std::int64_t>(sequence.size()); }
};

Queries queries(const Shape& s, std::vector<std::int32_t> sequence, std::vector<std::int32_t> positions,
                float scale = 1.0f) {
  const std::int64_t n = static_cast<std::int64_t>(sequence.size()) * s.q_heads * s.dim;
  return {std::move(sequence), std::move(positions), random_floats(n, 99, scale)};
}

Queries one_of(const Shape& s, const Queries& all, std::int64_t t) {
  const std::int64_t row = s.q_heads * s.dim;
  return {{all.sequence[t]}, {all.positions[t]},
          std::vector<float>(all.q.begin() + t * row, all.q.begin() + (t + 1) * row)};
}

std::vector<float> attend(ThreadPool& pool, const KernelSet& kernels, const Cache& c, const Queries& q) {
  const Shape& s = c.shape;
  std::vector<float> out(q.q.size(), kNaN);
  paged_attention(pool, kernels,
                  {q.q.data(), c.k.data(), c.v.data(), c.table.data(), q.sequence.data(), q.positions.data(),
                   out.data(), q.tokens(), s.q_heads, s.kv_heads, s.dim, s.page_tokens, c.max_pages,
                   1.0f / std::sqrt(static_cast<float>(s.dim)), s.window,
                   c.sinks.empty() ? nullptr : c.sinks.data()});
  return out;
}

std::vector<double> exact_head(const Cache& c, const Queries& q, std::int64_t t, std::int64_t head) {
  const Shape& s = c.shape;
  const std::int64_t kv = head / (s.q_heads / s.kv_heads), last = q.positions[t];
  const std::int64_t first = s.window > 0 ? std::max<std::int64_t>(0, last - s.window + 1) : 0;
  std::vector<double> scores, out(static_cast<std::size_t>(s.dim), 0.0);
  for (std::int64_t p = first; p <= last; ++p) {
    const float* key = &c.k[(c.at(q.sequence[t], p) * s.kv_heads + kv) * s.dim];
    double dot = 0.0;
    for (std::int64_t d = 0; d < s.dim; ++d) dot += double{q.q[(t * s.q_heads + head) * s.dim + d]} * key[d];
    scores.push_back(dot / std::sqrt(static_cast<double>(s.dim)));
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = s.has_sinks ? std::exp(c.sinks[head] - largest) : 0.0;
  for (double& score : scores) sum += score = std::exp(score - largest);
  for (std::int64_t p = first; p <= last; ++p) {
    const float* value = &c.v[(c.at(q.sequence[t], p) * s.kv_heads + kv) * s.dim];
    for (std::int64_t d = 0; d < s.dim; ++d) out[d] += scores[p - first] / sum * value[d];
  }
  return out;
}

void check_exact(const Cache& c, const Queries& q, const std::vector<float>& out) {
  const Shape& s = c.shape;
  for (std::int64_t t = 0; t < q.tokens(); ++t) {
    for (std::int64_t head = 0; head < s.q_heads; ++head) {
      const float* row = &out[(t * s.q_heads + head) * s.dim];
      if (q.sequence[t] < 0) {
        for (std::int64_t d = 0; d < s.dim; ++d) CHECK_EQ(row[d], 0.0f);
        continue;
      }
      const std::vector<double> exact = exact_head(c, q, t, head);
      for (std::int64_t d = 0; d < s.dim; ++d) CHECK_NEAR(row[d], exact[d], 3e-6);
    }
  }
}

}  // namespace

TEST(every_head_shape_and_page_boundary) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const Shape& s : {Shape{9, 3, 64, 16, 0}, Shape{4, 4, 40, 8, 0}, Shape{5, 1, 80, 16, 0},
                           Shape{8, 2, 128, 32, 0}, Shape{6, 2, 13, 4, 0}, Shape{3, 1, 1, 1, 0},
                           Shape{4, 2, 64, 16, 5}, Shape{2, 1, 20, 7, 1}, Shape{8, 2, 64, 16, 0, true},
                           Shape{6, 2, 13, 4, 9, true}}) {
      const Cache cache(s, {33, 70, 1}, 5);
      std::vector<std::int32_t> sequence, positions;
      for (const std::int32_t p : {0, 3, 4, 7, 8, 15, 16, 17, 31, 32}) {
        sequence.push_back(0);
        positions.push_back(p);
        sequence.push_back(1);
        positions.push_back(2 * p + 5);
      }
      sequence.insert(sequence.end(), {-1, 2, -1});
      positions.insert(positions.end(), {0, 0, 12345});
      const Queries q = queries(s, sequence, positions);
      for (const auto& pool : pools()) check_exact(cache, q, attend(*pool, *kernels, cache, q));
    }
  }
}

TEST(long_contexts_and_windows_across_chunks) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t window : {0, 1, 100, 256, 257, 1000}) {
      const Shape s{4, 2, 40, 16, window};
      const Cache cache(s, {1300, 520}, 7);
      const Queries q =
          queries(s, {0, 0, 0, 0, 0, 1, 1, -1}, {254, 255, 256, 768, 1299, 511, 512, 0}, 2.0f);
      check_exact(cache, q, attend(*pools()[0], *kernels, cache, q));
    }
  }
}

TEST(a_token_does_not_depend_on_batch_or_lanes) {
  for (const KernelSet* kernels : all_kernels()) {
    for (const std::int64_t window : {0, 300}) {
      const Shape s{6, 2, 64, 16, window, window > 0};
      const Cache cache(s, {900, 700, 40}, 11);
      std::vector<std::int32_t> sequence, positions;
      for (std::int32_t p = 0; p < 40; ++p) {   // a prefill
        sequence.push_back(2);
        positions.push_back(p);
      }
      sequence.insert(sequence.end(), {0, 1, -1, 0});
      positions.insert(positions.end(), {899, 699, 0, 513});
      const Queries all = queries(s, sequence, positions);
      const std::vector<float> together = attend(*pools()[0], *kernels, cache, all);
      for (const auto& pool : pools()) {
        CHECK(attend(*pool, *kernels, cache, all) == together);
        for (std::int64_t t = 0; t < all.tokens(); ++t) {   // alone: the chunks are shared out
          const std::vector<float> alone = attend(*pool, *kernels, cache, one_of(s, all, t));
          CHECK(std::equal(alone.begin(), alone.end(), together.begin() + t * s.q_heads * s.dim));
        }
      }
    }
  }
}

TEST(page_size_and_order_change_nothing) {
  for (const KernelSet* kernels : all_kernels()) {
    std::vector<float> first;
    for (const std::int64_t page_tokens : {1, 5, 16, 64, 600}) {
      const Shape s{4, 2, 48, page_tokens, 0};
      const std::vector<float> k = random_floats(600 * 2 * 48, 21), v = random_floats(600 * 2 * 48, 22);
      Cache cache(s, {600}, 13);
      for (std::int64_t p = 0; p < 600; ++p) {
        std::copy_n(&k[p * 96], 96, &cache.k[cache.at(0, p) * 96]);
        std::copy_n(&v[p * 96], 96, &cache.v[cache.at(0, p) * 96]);
      }
      const std::vector<float> out = attend(*pools()[1], *kernels, cache, queries(s, {0}, {599}));
      if (first.empty()) first = out;
      CHECK(out == first);
    }
  }
}

TEST(large_scores_do_not_overflow) {
  for (const KernelSet* kernels : all_kernels()) {
    const Shape s{2, 1, 64, 16, 0};
    const Cache cache(s, {600}, 17);
    const Queries q = queries(s, {0, 0}, {599, 10}, 1e4f);
    for (const float v : attend(*pools()[0], *kernels, cache, q)) CHECK(std::isfinite(v));
  }
}

TEST(a_sink_takes_its_share_whatever_its_size) {
  for (const KernelSet* kernels : all_kernels()) {
    const Shape s{3, 1, 16, 16, 0, true};
    Cache cache(s, {400}, 18);
    const Queries q = queries(s, {0}, {399});
    Cache none = cache;
    none.sinks.clear();
    cache.sinks = {-1e4f, 1e4f, -std::numeric_limits<float>::infinity()};
    const std::vector<float> with = attend(*pools()[0], *kernels, cache, q);
    const std::vector<float> without = attend(*pools()[0], *kernels, none, q);
    for (std::size_t i = 0; i < with.size(); ++i) CHECK_EQ(with[i], i / 16 == 1 ? 0.0f : without[i]);
  }
}

TEST(a_bad_key_poisons_only_those_who_see_it) {
  for (const KernelSet* kernels : all_kernels()) {
    const Shape s{2, 1, 64, 16, 0};
    Cache cache(s, {600}, 19);
    cache.k[cache.at(0, 300) * 64 + 3] = kNaN;
    const std::vector<float> out = attend(*pools()[0], *kernels, cache, queries(s, {0, 0, 0}, {299, 300, 599}));
    for (std::int64_t i = 0; i < 128; ++i) {
      CHECK(std::isfinite(out[i]));
      CHECK(std::isnan(out[128 + i]));
      CHECK(std::isnan(out[256 + i]));
    }
  }
}

TEST(no_tokens_and_only_padding) {
  const Shape s{2, 1, 8, 4, 0};
  const Cache cache(s, {4}, 23);
  CHECK(attend(*pools()[1], *all_kernels()[0], cache, queries(s, {}, {})).empty());
  const std::vector<float> out = attend(*pools()[1], *all_kernels()[0], cache, queries(s, {-1, -1}, {0, 0}));
  CHECK(out == std::vector<float>(32, 0.0f));
}

FT_TEST_MAIN
