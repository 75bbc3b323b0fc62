// What stands between gate and up of an expert or a dense feed-forward layer.
#pragma once

#include <cstdint>

namespace ft {

enum class Activation : std::uint8_t {
  SiLU,            // silu(g) * u
  GELU,            // gelu(g) * u, with the error function
  GELUTanh,        // gelu(g) * u, its tanh form
  ClampedSwiGLU,   // c * sigmoid(alpha * c) * (d + 1), c = min(g, limit), d = u within [-limit, limit]
  ReLUSquared,     // max(g, 0)^2 * u
};
inline constexpr int kActivationCount = 5;

struct GatedActivation {
  Activation kind = Activation::SiLU;
  float alpha = 1.702f, limit = 7.0f;   // of ClampedSwiGLU
};

}  // namespace ft
