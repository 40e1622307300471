"""The oracle: VRGD, SGD, Adam, LARS and LAMB in float64 NumPy, from the formulas, sharing no code with the package.

An update takes `samples[d][i]`, the gradient of sample d for variable i, d from 0 to k - 1.
"""

import numpy as np

EPS32 = 2.0**-23


def ratio(samples, gamma=0.1, ratio_max=1.0):
    """The ratio of one variable from its samples, an array [k, ...]."""
    g = np.asarray(samples, np.float64)
    k = len(g)
    gbar = g.mean(0)
    # Samples that are exact opposites in float32 have mean zero; float64 would see the rounding of the inputs.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        v = np.where(gbar == 0, (g != 0).mean(0), (((g - gbar) / gbar) ** 2).mean(0))
        defined = v > (EPS32 * max(64, k)) ** 2
        r = np.where(defined & (gbar != 0), 1 / v, 0.0)
    if not defined.any() or r[defined].mean() == 0:
        return np.ones_like(gbar)
    return np.where(defined, np.clip(r / r[defined].mean(), gamma, ratio_max), 1.0)


def clip(gradients, clipvalue=None, clipnorm=None, global_clipnorm=None):
    if clipvalue is not None:
        return [np.clip(g, -clipvalue, clipvalue) for g in gradients]
    if clipnorm is not None:
        return [g * clipnorm / max(np.linalg.norm(g), clipnorm) for g in gradients]
    if global_clipnorm is not None:
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        return [g * global_clipnorm / max(norm, global_clipnorm) for g in gradients]
    return gradients


class Optimizer:
    """One optimizer over float64 arrays. `rule` is "sgd", "adam", "lars" or "lamb"; `vr` False leaves the ratio out."""

    def __init__(
        self,
        rule,
        values,
        vr=True,
        learning_rate=0.01,
        momentum=0.0,
        nesterov=False,
        beta_1=0.9,
        beta_2=0.999,
        beta_3=None,
        epsilon=1e-7,
        amsgrad=False,
        weight_decay=0.0,
        trust_coefficient=0.001,
        gamma=0.1,
        ratio_max=1.0,
        second_moment="scaled_gradient",
        decays=lambda w: True,
        adapts=lambda w: w.ndim > 1,
        use_ema=False,
        ema_momentum=0.99,
        ema_overwrite_frequency=None,
        **clipping,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k not in ("self", "values")})
        self.w = [np.asarray(v, np.float64) for v in values]
        self.t = 0
        self.skipped = 0  # updates without effect, which count for the overwriting with averages alone
        self.m, self.v, self.v_max, self.p, self.average = ([np.zeros_like(w) for w in self.w] for _ in range(5))

    def update(self, samples):
        self.t += 1
        columns = [np.stack([np.asarray(s[i], np.float64) for s in samples]) for i in range(len(self.w))]
        ratios = [ratio(c, self.gamma, self.ratio_max) if self.vr else np.ones(c.shape[1:]) for c in columns]
        if self.beta_3 is not None and self.vr:
            self.p = [self.beta_3 * p + (1 - self.beta_3) * r for p, r in zip(self.p, ratios)]
            ratios = [p / (1 - self.beta_3**self.t) for p in self.p]
        gradients = clip([c.mean(0) for c in columns], **self.clipping)
        for i, (g, r) in enumerate(zip(gradients, ratios)):
            getattr(self, "_" + self.rule)(i, g, r * g)
            if self.use_ema:
                beta = self.ema_momentum if self.t > 1 else 0
                self.average[i] = beta * self.average[i] + (1 - beta) * self.w[i]
                if self.ema_overwrite_frequency and (self.t + self.skipped) % self.ema_overwrite_frequency == 0:
                    self.w[i] = self.average[i].copy()
        return self.w

    def _decay(self, i):
        return self.weight_decay if self.decays(self.w[i]) else 0.0

    def _sgd(self, i, g, ghat):
        lr = self.learning_rate
        w = self.w[i] * (1 - lr * self._decay(i))
        self.m[i] = self.momentum * self.m[i] - lr * ghat
        self.w[i] = w + (self.momentum * self.m[i] - lr * ghat if self.nesterov else self.m[i])

    def _moments(self, i, g, ghat):
        squared = ghat if self.second_moment == "scaled_gradient" else g
        self.m[i] = self.beta_1 * self.m[i] + (1 - self.beta_1) * ghat
        self.v[i] = self.beta_2 * self.v[i] + (1 - self.beta_2) * squared**2

    def _adam(self, i, g, ghat):
        w = self.w[i] * (1 - self.learning_rate * self._decay(i))
        self._moments(i, g, ghat)
        self.v_max[i] = np.maximum(self.v_max[i], self.v[i])
        v = self.v_max[i] if self.amsgrad else self.v[i]
        rate = self.learning_rate * np.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        self.w[i] = w - rate * self.m[i] / (np.sqrt(v) + self.epsilon)

    def _lars(self, i, g, ghat):
        w, decay = self.w[i], self._decay(i)
        w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(ghat)
        local = 1.0
        if self.adapts(w) and w_norm > 0 and g_norm > 0:
            local = self.trust_coefficient * w_norm / (g_norm + decay * w_norm)
        step = self.learning_rate * local * (ghat + decay * w)
        self.m[i] = self.momentum * self.m[i] + step
        self.w[i] = w - (self.momentum * self.m[i] + step if self.nesterov else self.m[i])

    def _lamb(self, i, g, ghat):
        w = self.w[i]
        self._moments(i, g, ghat)
        m_hat = self.m[i] / (1 - self.beta_1**self.t)
        v_hat = self.v[i] / (1 - self.beta_2**self.t)
        u = m_hat / (np.sqrt(v_hat) + self.epsilon) + self._decay(i) * w
        w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(u)
        trust = w_norm / u_norm if self.adapts(w) and w_norm > 0 and u_norm > 0 else 1.0
        self.w[i] = w - self.learning_rate * trust * u
