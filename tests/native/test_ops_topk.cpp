#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "ops_support.h"

using namespace ft;
using ops_support::random_floats;

namespace {

struct Routes {
  std::vector<float> weights;
  std::vector<std::int32_t> ids;
};

Routes route(const std::vector<float>& logits, std::int64_t experts, std::int64_t top_k, bool renormalize) {
  const std::int64_t tokens = static_cast<std::int64_t>(logits.size()) / experts;
  Routes routes{std::vector<float>(tokens * top_k, -1.0f), std::vector<std::int32_t>(tokens * top_k, -9)};
  route_topk(logits.data(), tokens, experts, top_k, renormalize, routes.weights.data(), routes.ids.data());
  return routes;
}

bool valid_and_distinct(const std::vector<std::int32_t>& ids, std::int64_t experts) {
  std::vector<std::int32_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  return sorted.front() >= 0 && sorted.back() < experts &&
         std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

}  // namespace

TEST(matches_a_stable_sort_and_a_double_softmax) {
  for (const auto& [experts, top_k] : {std::pair{8, 2}, {128, 8}, {1, 1}, {7, 7}, {60, 4}}) {
    for (const bool renormalize : {false, true}) {
      const std::int64_t tokens = 50;
      std::vector<float> logits = random_floats(tokens * experts, static_cast<unsigned>(experts), 3.0f);
      for (float& v : logits) v = std::round(v * 4.0f) / 4.0f;   // many ties
      const Routes routes = route(logits, experts, top_k, renormalize);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* row = logits.data() + t * experts;
        std::vector<std::int32_t> order(experts);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
        double all = 0.0, chosen = 0.0;
        for (int e = 0; e < experts; ++e) all += std::exp(static_cast<double>(row[e]));
        for (int k = 0; k < top_k; ++k) chosen += std::exp(static_cast<double>(row[order[k]]));
        for (int k = 0; k < top_k; ++k) {
          CHECK_EQ(routes.ids[t * top_k + k], order[k]);
          const double exact = std::exp(static_cast<double>(row[order[k]])) / (renormalize ? chosen : all);
          CHECK_NEAR(routes.weights[t * top_k + k], exact, 3e-7 * exact);
        }
      }
    }
  }
}

TEST(ties_go_to_the_lower_id) {
  const Routes routes = route({1, 3, 3, 2, 3, 2}, 6, 4, true);
  CHECK(routes.ids == (std::vector<std::int32_t>{1, 2, 4, 3}));
}

TEST(huge_logits_do_not_overflow) {
  const Routes routes = route({1e30f, -1e30f, 9e29f, 0.0f}, 4, 2, false);
  CHECK(routes.ids == (std::vector<std::int32_t>{0, 2}));
  CHECK(routes.weights == (std::vector<float>{1.0f, 0.0f}));
}

TEST(a_nan_or_infinity_gives_nan_weights_and_valid_ids) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf}) {
    for (std::size_t at = 0; at < 6; ++at) {
      for (const bool renormalize : {false, true}) {
        std::vector<float> logits = {0.5f, 2.0f, -1.0f, 0.25f, 3.0f, 1.0f};
        logits[at] = bad;
        const Routes routes = route(logits, 6, 3, renormalize);
        CHECK(valid_and_distinct(routes.ids, 6));
        for (const float weight : routes.weights) CHECK(std::isnan(weight));
      }
    }
  }
  for (const float all : {nan, inf, -inf}) {
    const Routes routes = route(std::vector<float>(6, all), 6, 6, true);
    CHECK(valid_and_distinct(routes.ids, 6));
    for (const float weight : routes.weights) CHECK(std::isnan(weight));
  }
}

TEST(an_expert_that_is_masked_out_gets_no_weight) {
  const float inf = std::numeric_limits<float>::infinity();
  const Routes routes = route({-inf, 1.0f, -inf}, 3, 2, true);
  CHECK(routes.ids == (std::vector<std::int32_t>{1, 0}));
  CHECK(routes.weights == (std::vector<float>{1.0f, 0.0f}));
}

FT_TEST_MAIN
