// Layers of experts with random weights, and batches of routes for them.
#pragma once

#include <random>
#include <vector>

#include "core/pool.h"
#include "ops/ops.h"
#include "weights.h"

namespace experts {

using ft::Format;
using ft::KernelSet;
using weights::random_floats;
using weights::random_weights;
using weights::Weights;

struct Shape {
  std::int64_t experts, hidden, inner;
};

// The experts of a layer, and their memory.
struct Layer {
  std::vector<Weights> gate, up, down;
  ft::ExpertBank bank;
  std::vector<std::vector<float>> biases;   // gate, up and down of each expert, if the bank has them

  double bias(int part, std::int64_t expert, std::int64_t row) const {
    return biases.empty() ? 0.0 : biases[static_cast<std::size_t>(expert * 3 + part)][static_cast<std::size_t>(row)];
  }
};

inline ft::ExpertPart part_of(const std::vector<Weights>& experts) {
  const ft::PackedMatrix& m = experts[0].matrix;
  ft::ExpertPart part{m.format, m.rows, m.cols, {}, {}, m.code_row_stride, m.code_block_stride,
                      m.scale_row_stride, m.scale_block_stride};
  for (const Weights& w : experts) {
    part.codes.push_back(reinterpret_cast<std::uint64_t>(w.matrix.codes));
    part.scales.push_back(reinterpret_cast<std::uint64_t>(w.matrix.scales));
    if (m.factor != 1.0f) part.factors.push_back(reinterpret_cast<std::uint64_t>(&w.matrix.factor));
  }
  return part;
}

// `factor`: of gate, and more of up and of down and of every further expert; 1: none.
inline Layer make_layer(Format gate, Format up, Format down, const Shape& s, bool planes, unsigned seed,
                        float factor = 1.0f) {
  Layer layer;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    layer.gate.push_back(random_weights(gate, s.inner, s.hidden, ++seed, planes));
    layer.up.push_back(random_weights(up, s.inner, s.hidden, ++seed, planes));
    layer.down.push_back(random_weights(down, s.hidden, s.inner, ++seed, planes));
    layer.gate.back().matrix.factor = factor;
    layer.up.back().matrix.factor = factor * factor;
    layer.down.back().matrix.factor = factor * factor * factor * static_cast<float>(factor == 1.0f ? 1 : 1 + e);
  }
  layer.bank = {part_of(layer.gate), part_of(layer.up), part_of(layer.down), ft::Activation::SiLU};
  return layer;
}

inline void add_biases(Layer& layer, unsigned seed) {
  ft::ExpertPart* const parts[] = {&layer.bank.gate, &layer.bank.up, &layer.bank.down};
  for (std::size_t e = 0; e < layer.gate.size(); ++e) {
    for (ft::ExpertPart* part : parts) layer.biases.push_back(random_floats(part->rows, ++seed));
  }
  for (std::size_t e = 0; e < layer.gate.size(); ++e) {
    for (std::size_t i = 0; i < 3; ++i) {
      parts[i]->biases.push_back(reinterpret_cast<std::uint64_t>(layer.biases[e * 3 + i].data()));
    }
  }
}

struct Batch {
  std::int64_t tokens, top_k;
  std::vector<float> x, weights;
  std::vector<std::int32_t> ids;
};

// Distinct experts per token; many tokens share each.
inline Batch make_batch(const Shape& s, std::int64_t tokens, std::int64_t top_k, unsigned seed) {
  Batch b{tokens, top_k, random_floats(tokens * s.hidden, seed), random_floats(tokens * top_k, seed + 1), {}};
  std::mt19937 rng(seed);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto first = static_cast<std::int64_t>(rng() % static_cast<unsigned>(s.experts));
    for (std::int64_t k = 0; k < top_k; ++k) {
      b.ids.push_back(static_cast<std::int32_t>((first + k * 5) % s.experts));   // 5 is prime to `experts`
    }
  }
  return b;
}

inline std::vector<double> run(ft::ThreadPool& pool, const KernelSet& kernels, const Layer& layer,
                               const Batch& b) {
  std::vector<double> y(b.x.size(), -3.0);
  const ft::ExpertArgs args{&layer.bank,      b.x.data(), b.ids.data(),
                            b.weights.data(), y.data(),   b.tokens, b.top_k};
  pool.run(*ft::make_expert_task(kernels, args, pool.teams()));
  return y;
}

}  // namespace experts
