#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/elementwise_parallel.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"

namespace ft {
namespace {

// The positions of a sequence are cut into chunks at multiples of this. Each chunk's softmax is
// computed by itself, and the chunks are combined from the first to the last, so a result is the
// same whether one lane goes through the chunks or many lanes share them. 256 rows of keys of a
// 128-wide head are 128 KiB: they stay in L2 between the queries that read them.
constexpr std::int64_t kChunk = 256;

// Attention over some positions, for the query heads of one kv head: unnormalised values [G, D],
// and the largest score and the sum of exponentials, [G] each.
struct Partial {
  float *values, *largest, *sum;
};

struct Visible {
  std::int64_t first, end;   // positions [first, end)
  std::int64_t first_chunk() const { return first / kChunk; }
  std::int64_t chunks() const { return (end - 1) / kChunk - first_chunk() + 1; }
};

Visible visible(const AttentionArgs& args, std::int64_t token) {
  const std::int64_t end = args.positions[token] + std::int64_t{1};
  return {args.window > 0 ? std::max<std::int64_t>(0, end - args.window) : 0, end};
}

class AttentionTask final : public Task {
 public:
  AttentionTask(const KernelSet& kernels, const AttentionArgs& args, int lanes)
      : kernels_(kernels), args_(args), group_(args.q_heads / args.kv_heads) {
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      if (args.sequence[t] >= 0) most_chunks_ = std::max(most_chunks_, visible(args, t).chunks());
    }
    // With fewer queries than lanes need to stay busy (decode), the chunks are shared out as well.
    split_ = lanes > 1 && most_chunks_ > 1 && pairs() < 4 * lanes;
    scratch_.resize(static_cast<std::size_t>(lanes * scratch_floats()));
    if (split_) partials_.resize(static_cast<std::size_t>(pairs() * most_chunks_ * partial_floats()));
  }

  void run(Lane& lane) override {
    float* scratch = scratch_.data() + lane.index() * scratch_floats();
    if (split_) {
      run_chunks(lane, scratch);
    } else {
      run_pairs(scratch);
    }
  }

 private:
  std::int64_t pairs() const { return args_.tokens * args_.kv_heads; }
  std::int64_t partial_floats() const { return group_ * (args_.head_dim + 2); }
  // Scores of a chunk and two partials, rounded up to cache lines so that lanes do not share any.
  std::int64_t scratch_floats() const { return (group_ * kChunk + 2 * partial_floats() + 31) / 16 * 16; }

  Partial partial_at(float* base) const {
    float* largest = base + group_ * args_.head_dim;
    return {base, largest, largest + group_};
  }
  Partial stored(std::int64_t pair, std::int64_t chunk) {
    return partial_at(partials_.data() + (pair * most_chunks_ + chunk) * partial_floats());
  }

  // A pair is a token and a kv head. Heads outside, so that consecutive tokens find the head's keys
  // in the cache; last tokens first, as they see the most.
  void run_pairs(float* scratch) {
    const Partial total = partial_at(scratch + group_ * kChunk);
    const Partial next = partial_at(scratch + group_ * kChunk + partial_floats());
    for (std::int64_t pair; (pair = next_.take()) < pairs();) {
      const std::int64_t token = args_.tokens - 1 - pair % args_.tokens, head = pair / args_.tokens;
      const std::int64_t chunks = chunks_of(token);
      for (std::int64_t c = 0; c < chunks; ++c) {
        attend_chunk(token, head, c, scratch, c == 0 ? total : next);
        if (c > 0) merge(total, next);
      }
      finish(token, head, total);
    }
  }

  void run_chunks(Lane& lane, float* scratch) {
    for (std::int64_t tile; (tile = next_.take()) < pairs() * most_chunks_;) {
      const std::int64_t pair = tile / most_chunks_, c = tile % most_chunks_;
      const std::int64_t token = pair / args_.kv_heads, head = pair % args_.kv_heads;
      if (c < chunks_of(token)) attend_chunk(token, head, c, scratch, stored(pair, c));
    }
    lane.barrier();
    for (std::int64_t pair = lane.index(); pair < pairs(); pair += lane.count()) {
      const std::int64_t token = pair / args_.kv_heads, head = pair % args_.kv_heads;
      const Partial total = stored(pair, 0);
      for (std::int64_t c = 1; c < chunks_of(token); ++c) merge(total, stored(pair, c));
      finish(token, head, total);
    }
  }

  std::int64_t chunks_of(std::int64_t token) const {
    return args_.sequence[token] < 0 ? 0 : visible(args_, token).chunks();
  }

  void attend_chunk(std::int64_t token, std::int64_t head, std::int64_t chunk, float* scores,
                    const Partial& out) const {
    const Visible seen = visible(args_, token);
    const std::int64_t start = (seen.first_chunk() + chunk) * kChunk;
    const std::int64_t begin = std::max(seen.first, start), end = std::min(seen.end, start + kChunk);
    const float* q = args_.q + (token * args_.q_heads + head * group_) * args_.head_dim;
    for_each_run(token, head, begin, end, [&](std::int64_t at, const HeadRows& rows) {
      kernels_.attention_scores(q, group_, rows.on(args_.k_cache), args_.scale, scores + at, kChunk);
    });
    std::fill_n(out.values, group_ * args_.head_dim, 0.0f);
    for (std::int64_t g = 0; g < group_; ++g) {
      float* row = scores + g * kChunk;
      out.largest[g] = kernels_.max_f32(row, end - begin);
      out.sum[g] = kernels_.exp_sum(row, out.largest[g], end - begin);
    }
    for_each_run(token, head, begin, end, [&](std::int64_t at, const HeadRows& rows) {
      kernels_.attention_values(scores + at, kChunk, group_, rows.on(args_.v_cache), out.values);
    });
  }

  struct HeadRows {   // where consecutive positions of one head lie in either cache
    std::int64_t offset, stride, count, dim;
    CachedRows on(const float* cache) const { return {cache + offset, stride, count, dim}; }
  };

  // body(position - begin, rows) for every page that [begin, end) touches.
  template <class Body>
  void for_each_run(std::int64_t token, std::int64_t head, std::int64_t begin, std::int64_t end,
                    const Body& body) const {
    const std::int32_t* pages = args_.block_table + args_.sequence[token] * args_.max_pages;
    const std::int64_t stride = args_.kv_heads * args_.head_dim;
    for (std::int64_t p = begin; p < end;) {
      const std::int64_t inside = p % args_.page_tokens;
      const std::int64_t count = std::min(args_.page_tokens - inside, end - p);
      const std::int64_t row = pages[p / args_.page_tokens] * args_.page_tokens + inside;
      body(p - begin, HeadRows{row * stride + head * args_.head_dim, stride, count, args_.head_dim});
      p += count;
    }
  }

  void merge(const Partial& total, const Partial& next) const {
    for (std::int64_t g = 0; g < group_; ++g) {
      const float largest = std::max(total.largest[g], next.largest[g]);
      const float a = std::exp(total.largest[g] - largest), b = std::exp(next.largest[g] - largest);
      float* to = total.values + g * args_.head_dim;
      const float* from = next.values + g * args_.head_dim;
      for (std::int64_t d = 0; d < args_.head_dim; ++d) to[d] = to[d] * a + from[d] * b;
      total.sum[g] = total.sum[g] * a + next.sum[g] * b;
      total.largest[g] = largest;
    }
  }

  void finish(std::int64_t token, std::int64_t head, const Partial& total) const {
    float* out = args_.out + (token * args_.q_heads + head * group_) * args_.head_dim;
    if (args_.sequence[token] < 0) {
      std::fill_n(out, group_ * args_.head_dim, 0.0f);
      return;
    }
    for (std::int64_t g = 0; g < group_; ++g) {
      for (std::int64_t d = 0; d < args_.head_dim; ++d) {
        out[g * args_.head_dim + d] = total.values[g * args_.head_dim + d] / total.sum[g];
      }
    }
  }

  const KernelSet& kernels_;
  const AttentionArgs args_;
  const std::int64_t group_;
  std::int64_t most_chunks_ = 0;
  bool split_ = false;
  std::vector<float> scratch_;    // [lanes, scratch_floats]
  std::vector<float> partials_;   // [tokens, kv heads, most_chunks, partial_floats], if split
  TileCounter next_;
};

class CallerOnly final : public Lane {
 public:
  int index() const override { return 0; }
  int count() const override { return 1; }
  void barrier() override {}
};

}  // namespace

void paged_attention(ThreadPool& pool, const KernelSet& kernels, const AttentionArgs& args) {
  std::int64_t rows = 0;
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    if (args.sequence[t] >= 0) rows += visible(args, t).end - visible(args, t).first;
  }
  if (worth_waking(pool, rows, 2 * args.q_heads * args.head_dim)) {
    AttentionTask task(kernels, args, pool.size());
    pool.run(task);
  } else {
    CallerOnly lane;
    AttentionTask(kernels, args, 1).run(lane);
  }
}

}  // namespace ft
