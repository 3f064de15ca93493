// LAMB, for one element, and how far a tensor moves. In two sweeps, because the second needs the norms that the
// first finds: moments, update; update again, move.
#pragma once

#include <cmath>

#include "ops.h"

namespace zf {

struct LambNumbers {
  float beta1_rest, beta2, beta2_rest, factor, weight_decay, eps_inside, eps_outside;
};

ZF_HD LambNumbers lamb_numbers(const LambOptions& o) {
  return {
      float(1 - o.beta1),
      float(o.beta2),
      float(1 - o.beta2),
      float(o.factor),
      float(o.weight_decay),
      float(o.eps_inside_sqrt ? o.eps : 0),
      float(o.eps_inside_sqrt ? 0 : o.eps),
  };
}

ZF_HD void lamb_moments(float grad, float& exp_avg, float& exp_avg_sq, const LambNumbers& n) {
  const float g = grad * n.factor;
  exp_avg = exp_avg + n.beta1_rest * (g - exp_avg);
  exp_avg_sq = exp_avg_sq * n.beta2 + n.beta2_rest * g * g;
}

// From the moments as they were stored (bf16 has rounded them): both sweeps must find the same update.
ZF_HD float lamb_update(float master, float exp_avg, float exp_avg_sq, const LambNumbers& n) {
  const float root = sqrtf(exp_avg_sq + n.eps_inside) + n.eps_outside;
  return exp_avg / root + n.weight_decay * master;
}

// The masters of a slot move by this times their update. `norms`: the sums of squares of both.
ZF_HD float lamb_step_size(const LambOptions& o, float step, const double* norms) {
  const double weight = sqrt(norms[0]), change = sqrt(norms[1]);
  double trust = 1;
  if (weight > 0 && change > 0) {
    trust = weight / change;
    trust = trust < o.min_trust ? o.min_trust : trust;
    trust = trust > o.max_trust ? o.max_trust : trust;
  }
  double size = o.lr;
  if (o.bias_correction) size = o.lr * sqrt(1 - pow(o.beta2, double(step))) / (1 - pow(o.beta1, double(step)));
  return float(size * trust);
}

}  // namespace zf
