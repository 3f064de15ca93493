// Adam, for one element. Everything that is the same for all elements of a tensor is computed before.
#pragma once

#include <cmath>

#include "ops.h"

namespace zf {

struct AdamNumbers {
  float beta1_rest, beta2, beta2_rest, decay, step_size, root_scale, eps, factor;
};

ZF_HD AdamNumbers adam_numbers(const AdamOptions& o, float step) {
  const double first = o.bias_correction ? 1 - pow(o.beta1, double(step)) : 1;
  const double second = o.bias_correction ? 1 - pow(o.beta2, double(step)) : 1;
  return {
      float(1 - o.beta1),
      float(o.beta2),
      float(1 - o.beta2),
      float(o.decoupled ? 1 - o.lr * o.weight_decay : o.weight_decay),
      float(o.lr / first),
      float(1 / sqrt(second)),
      float(o.eps),
      float(o.factor),
  };
}

template <bool decoupled>
ZF_HD void adam(float& master, float grad, float& exp_avg, float& exp_avg_sq, const AdamNumbers& n) {
  const float g = decoupled ? grad * n.factor : grad * n.factor + master * n.decay;
  exp_avg = exp_avg + n.beta1_rest * (g - exp_avg);
  exp_avg_sq = exp_avg_sq * n.beta2 + n.beta2_rest * g * g;
  const float root = sqrtf(exp_avg_sq) * n.root_scale + n.eps;
  master = (decoupled ? master * n.decay : master) - n.step_size * exp_avg / root;
}

}  // namespace zf
