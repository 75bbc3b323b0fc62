#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/ops.h"

namespace ft {
namespace {

// The ids of the top_k largest logits, largest first, ties to the lower id. A NaN never overtakes and
// is never overtaken, so the ids are valid and distinct whatever the logits are.
void select_top(const float* logits, std::int64_t experts, std::int64_t top_k, std::int32_t* ids) {
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int64_t place = std::min(e, top_k);
    while (place > 0 && logits[e] > logits[ids[place - 1]]) {
      if (place < top_k) ids[place] = ids[place - 1];
      --place;
    }
    if (place < top_k) ids[place] = static_cast<std::int32_t>(e);
  }
}

void route_token(const float* logits, std::int64_t experts, std::int64_t top_k, bool renormalize,
                 float* weights, std::int32_t* ids) {
  select_top(logits, experts, top_k, ids);
  float largest = -std::numeric_limits<float>::infinity();
  for (std::int64_t e = 0; e < experts; ++e) largest = std::max(largest, logits[e]);
  // A NaN, an infinite or an empty row makes this sum NaN, and with it every weight of the token.
  double all = 0.0, chosen = 0.0;
  for (std::int64_t e = 0; e < experts; ++e) all += std::exp(logits[e] - largest);
  for (std::int64_t k = 0; k < top_k; ++k) {
    weights[k] = std::exp(logits[ids[k]] - largest);
    chosen += weights[k];
  }
  const double total = std::isnan(all) ? all : renormalize ? chosen : all;
  for (std::int64_t k = 0; k < top_k; ++k) weights[k] = static_cast<float>(weights[k] / total);
}

}  // namespace

// On the caller: a few hundred exponentials per token, little beside one expert's arithmetic.
void route_topk(const float* logits, std::int64_t tokens, std::int64_t experts, std::int64_t top_k,
                bool renormalize, float* weights, std::int32_t* ids) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    route_token(logits + t * experts, experts, top_k, renormalize, weights + t * top_k, ids + t * top_k);
  }
}

}  // namespace ft
