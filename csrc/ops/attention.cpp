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
// same whether one lane goes through the chunks or many lanes share them.
constexpr std::int64_t kChunk = 256;
// Consecutive tokens of one sequence (a prefill) read each page of keys and values together.
constexpr std::int64_t kBlockTokens = 8;
// More than this many floats of partial results are not kept for later; see split_.
constexpr std::int64_t kMostPartialFloats = std::int64_t{1} << 24;

struct Span {   // positions [begin, end)
  std::int64_t begin, end;
  std::int64_t count() const { return std::max<std::int64_t>(0, end - begin); }
};

Span clip(const Span& a, const Span& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// What a token sees; nothing if it is padding.
Span visible(const AttentionArgs& args, std::int64_t token) {
  if (args.sequence[token] < 0) return {0, 0};
  const std::int64_t end = args.positions[token] + std::int64_t{1};
  return {args.window > 0 ? std::max<std::int64_t>(0, end - args.window) : 0, end};
}

// Tokens [first, first + tokens) of one sequence, and the chunks that at least one of them sees.
struct Block {
  std::int64_t first, tokens, first_chunk, chunks;
};

std::vector<Block> cut_into_blocks(const AttentionArgs& args) {
  std::vector<Block> blocks;
  for (std::int64_t t = 0; t < args.tokens;) {
    Span all = visible(args, t);
    std::int64_t n = 1;
    for (; n < kBlockTokens && t + n < args.tokens && args.sequence[t + n] == args.sequence[t]; ++n) {
      const Span seen = visible(args, t + n);
      all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    const std::int64_t first_chunk = all.begin / kChunk;
    blocks.push_back({t, n, first_chunk, (all.end + kChunk - 1) / kChunk - first_chunk});
    t += n;
  }
  return blocks;
}

// Attention of a block over some positions, for the query heads of one kv head. R = tokens * group
// rows: unnormalised values [R, D], the largest score and the sum of exponentials [R].
struct Partial {
  float *values, *largest, *sum;
};

class AttentionTask final : public Task {
 public:
  AttentionTask(const KernelSet& kernels, const AttentionArgs& args, int lanes)
      : kernels_(kernels), args_(args), group_(args.q_heads / args.kv_heads), blocks_(cut_into_blocks(args)) {
    std::int64_t chunks = 0, tokens = 0;
    for (const Block& block : blocks_) {
      chunks = std::max(chunks, block.chunks);
      tokens = std::max(tokens, block.tokens);
    }
    most_chunks_ = chunks;
    rows_ = tokens * group_;
    // With fewer blocks than the lanes need to stay busy (decode, a short prefill), lanes share each
    // block's chunks and heads, and its partial results wait for the last of them.
    const std::int64_t partial_floats = tiles() * this->partial_floats();
    split_ = lanes > 1 && block_count() < 4 * lanes && partial_floats <= kMostPartialFloats;
    scratch_.resize(static_cast<std::size_t>(lanes * scratch_floats()));
    if (split_) partials_.resize(static_cast<std::size_t>(partial_floats));
  }

  void run(Lane& lane) override {
    float* scratch = scratch_.data() + lane.index() * scratch_floats();
    if (split_) {
      run_tiles(lane, scratch);
    } else {
      run_blocks(scratch);
    }
  }

 private:
  std::int64_t block_count() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t tiles() const { return block_count() * most_chunks_ * args_.kv_heads; }
  std::int64_t partial_floats() const { return rows_ * (args_.head_dim + 2); }
  // Queries, scores, one partial and a total per kv head, in whole cache lines of the lane's own.
  std::int64_t scratch_floats() const {
    const std::int64_t partials = (1 + args_.kv_heads) * partial_floats();
    return (rows_ * (args_.head_dim + kChunk) + partials + 31) / 16 * 16;
  }
  Partial partial_at(float* base) const {
    float* largest = base + rows_ * args_.head_dim;
    return {base, largest, largest + rows_};
  }
  Partial stored(std::int64_t block, std::int64_t chunk, std::int64_t head) {
    const std::int64_t tile = (block * most_chunks_ + chunk) * args_.kv_heads + head;
    return partial_at(partials_.data() + tile * partial_floats());
  }

  // One lane per block. Last blocks first, as they see the most; heads inside of chunks, because a
  // position's heads share memory pages.
  void run_blocks(float* scratch) {
    float* partials = scratch + rows_ * (args_.head_dim + kChunk);
    const Partial next = partial_at(partials);
    for (std::int64_t i; (i = next_.take()) < block_count();) {
      const Block& block = blocks_[static_cast<std::size_t>(block_count() - 1 - i)];
      for (std::int64_t c = 0; c < block.chunks; ++c) {
        for (std::int64_t head = 0; head < args_.kv_heads; ++head) {
          attend(block, c, head, scratch, next);
          combine(block, c, partial_at(partials + (1 + head) * partial_floats()), next);
        }
      }
      for (std::int64_t head = 0; head < args_.kv_heads; ++head) {
        finish(block, head, partial_at(partials + (1 + head) * partial_floats()));
      }
    }
  }

  void run_tiles(Lane& lane, float* scratch) {
    for (std::int64_t tile; (tile = next_.take()) < tiles();) {
      const std::int64_t head = tile % args_.kv_heads, c = tile / args_.kv_heads % most_chunks_;
      const std::int64_t b = tile / args_.kv_heads / most_chunks_;
      const Block& block = blocks_[static_cast<std::size_t>(b)];
      if (c < block.chunks) attend(block, c, head, scratch, stored(b, c, head));
    }
    lane.barrier();
    const Partial total = partial_at(scratch + rows_ * (args_.head_dim + kChunk));
    for (std::int64_t pair = lane.index(); pair < block_count() * args_.kv_heads; pair += lane.count()) {
      const std::int64_t b = pair / args_.kv_heads, head = pair % args_.kv_heads;
      const Block& block = blocks_[static_cast<std::size_t>(b)];
      for (std::int64_t c = 0; c < block.chunks; ++c) combine(block, c, total, stored(b, c, head));
      finish(block, head, total);
    }
  }

  Span chunk_span(const Block& block, std::int64_t chunk) const {
    const std::int64_t begin = (block.first_chunk + chunk) * kChunk;
    return {begin, begin + kChunk};
  }

  // One chunk by itself, for every token of the block that sees some of it.
  void attend(const Block& block, std::int64_t chunk, std::int64_t head, float* scratch,
              const Partial& out) const {
    const Span span = chunk_span(block, chunk);
    const std::int64_t dim = args_.head_dim;
    float *queries = scratch, *scores = scratch + rows_ * dim;
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      const float* q = args_.q + ((block.first + t) * args_.q_heads + head * group_) * dim;
      std::copy_n(q, group_ * dim, queries + t * group_ * dim);
    }
    for_each_run(block, head, span, [&](const RowRange& rows, std::int64_t at, const HeadRows& run) {
      kernels_.attention_scores(queries + rows.first * dim, rows.count, run.on(args_.k_cache), args_.scale,
                                scores + rows.first * kChunk + at, kChunk);
    });
    for (std::int64_t row = 0; row < block.tokens * group_; ++row) {
      const Span seen = clip(visible(args_, block.first + row / group_), span);
      if (seen.count() == 0) continue;
      float* own = scores + row * kChunk + (seen.begin - span.begin);
      out.largest[row] = kernels_.max_f32(own, seen.count());
      out.sum[row] = kernels_.exp_sum(own, out.largest[row], seen.count());
    }
    std::fill_n(out.values, block.tokens * group_ * dim, 0.0f);
    for_each_run(block, head, span, [&](const RowRange& rows, std::int64_t at, const HeadRows& run) {
      kernels_.attention_values(scores + rows.first * kChunk + at, kChunk, rows.count, run.on(args_.v_cache),
                                out.values + rows.first * dim);
    });
  }

  struct RowRange {   // of a block's tokens * group
    std::int64_t first, count;
  };

  struct HeadRows {   // where consecutive positions of one head lie in either cache
    std::int64_t offset, stride, count, dim;
    CachedRows on(const float* cache) const { return {cache + offset, stride, count, dim}; }
  };

  // body(rows, position - span.begin, cached rows) for every page that the span touches:
  // once for all rows of the block where each token sees all of it, else token by token.
  template <class Body>
  void for_each_run(const Block& block, std::int64_t head, const Span& span, const Body& body) const {
    const std::int32_t* pages = args_.block_table + args_.sequence[block.first] * args_.max_pages;
    const std::int64_t stride = args_.kv_heads * args_.head_dim;
    const auto call = [&](std::int64_t token, std::int64_t tokens, const Span& run) {
      const std::int64_t page = pages[run.begin / args_.page_tokens];
      const std::int64_t slot = page * args_.page_tokens + run.begin % args_.page_tokens;
      body(RowRange{token * group_, tokens * group_}, run.begin - span.begin,
           HeadRows{slot * stride + head * args_.head_dim, stride, run.count(), args_.head_dim});
    };
    Span all = {span.end, span.begin}, common = span;
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      const Span seen = clip(visible(args_, block.first + t), span);
      common = clip(common, seen);
      if (seen.count() > 0) all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    for (std::int64_t p = all.begin; p < all.end;) {
      const std::int64_t page_end = (p / args_.page_tokens + 1) * args_.page_tokens;
      const Span run = {p, std::min(page_end, all.end)};
      if (common.begin <= run.begin && run.end <= common.end) {
        call(0, block.tokens, run);
      } else {
        for (std::int64_t t = 0; t < block.tokens; ++t) {
          const Span own = clip(visible(args_, block.first + t), run);
          if (own.count() > 0) call(t, 1, own);
        }
      }
      p = run.end;
    }
  }

  // Adds a chunk to the total of each token that sees some of it. A token's first chunk starts it.
  void combine(const Block& block, std::int64_t chunk, const Partial& total, const Partial& next) const {
    const Span span = chunk_span(block, chunk);
    const std::int64_t dim = args_.head_dim;
    for (std::int64_t row = 0; row < block.tokens * group_; ++row) {
      const Span seen = visible(args_, block.first + row / group_);
      if (clip(seen, span).count() == 0) continue;
      float* to = total.values + row * dim;
      const float* from = next.values + row * dim;
      if (seen.begin >= span.begin) {
        std::copy_n(from, dim, to);
        total.sum[row] = next.sum[row];
        total.largest[row] = next.largest[row];
        continue;
      }
      const float largest = std::max(total.largest[row], next.largest[row]);
      const float a = std::exp(total.largest[row] - largest), b = std::exp(next.largest[row] - largest);
      for (std::int64_t d = 0; d < dim; ++d) to[d] = to[d] * a + from[d] * b;
      total.sum[row] = total.sum[row] * a + next.sum[row] * b;
      total.largest[row] = largest;
    }
  }

  void finish(const Block& block, std::int64_t head, const Partial& total) const {
    const std::int64_t dim = args_.head_dim;
    for (std::int64_t row = 0; row < block.tokens * group_; ++row) {
      const std::int64_t token = block.first + row / group_, q_head = head * group_ + row % group_;
      float* out = args_.out + (token * args_.q_heads + q_head) * dim;
      if (args_.sequence[token] < 0) {
        std::fill_n(out, dim, 0.0f);
        continue;
      }
      float sum = total.sum[row], share = 1.0f;
      if (args_.sinks != nullptr) {
        const float largest = std::max(total.largest[row], args_.sinks[q_head]);
        share = std::exp(total.largest[row] - largest);
        sum = sum * share + std::exp(args_.sinks[q_head] - largest);
      }
      for (std::int64_t d = 0; d < dim; ++d) out[d] = total.values[row * dim + d] * share / sum;
    }
  }

  const KernelSet& kernels_;
  const AttentionArgs args_;
  const std::int64_t group_;
  const std::vector<Block> blocks_;
  std::int64_t most_chunks_, rows_;   // of the largest block
  bool split_;
  std::vector<float> scratch_;    // [lanes, scratch_floats]
  std::vector<float> partials_;   // [blocks, most_chunks, kv heads, partial_floats], if split
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
  std::int64_t rows = 0;   // pairs of a token and a position that it sees
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    rows += visible(args, t).count();
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
