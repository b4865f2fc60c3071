"""Algorithms 1 and 2 of the paper in NumPy, with a loop wherever the paper has one: slow, obvious, and the judge of the library."""

import numpy as np


def dpps(
    s0,
    weights,
    perturbations,
    noise,
    *,
    budget,
    noise_rate,
    c_prime,
    decay,
    sync_every=0,
    recursion="network",
    common_start=False,
):
    """Algorithm 1. `weights(t)` is a dense matrix, `noise[t][i]` standard Laplace noise. Yields (s, a, y, S) after every round."""
    n = len(s0)
    s, a = s0.copy(), np.ones(n)
    carried = [0.0 if common_start else 2 * c_prime * np.abs(s0[i]).sum() for i in range(n)]
    for t in range(len(perturbations)):
        half = np.zeros_like(s)
        own = [0.0] * n
        for i in range(n):
            half[i] = s[i] + perturbations[t][i]
            own[i] = carried[i] + 2 * c_prime * np.abs(perturbations[t][i]).sum()
        sensitivity = max(own)
        message, added = np.zeros_like(s), np.zeros_like(s)
        for i in range(n):
            added[i] = noise_rate * (sensitivity / budget) * noise[t][i]
            message[i] = half[i] + added[i]
        synchronise = sync_every > 0 and (t + 1) % sync_every == 0
        w = np.full((n, n), 1 / n) if synchronise else weights(t)
        new_s, new_a = np.zeros_like(s), np.zeros(n)
        for i in range(n):
            for j in range(n):
                new_s[i] += w[i, j] * message[j]
                new_a[i] += w[i, j] * a[j]
        s, a = new_s, new_a
        y = np.stack([s[i] / a[i] for i in range(n)])
        for i in range(n):
            if synchronise:
                carried[i] = 0.0
            else:
                before = sensitivity if recursion == "network" else own[i]
                carried[i] = decay * before + 2 * c_prime * decay * np.abs(added[i]).sum()
        yield s.copy(), a.copy(), y, sensitivity


def softmax_gradient(z, label):
    """Of the cross-entropy at outputs z."""
    p = np.exp(z - z.max())
    p /= p.sum()
    p[label] -= 1
    return p


class TinyMLP:
    """in-h-out with tanh after both layers, one example at a time; parameters as torch's nn.Linear."""

    @staticmethod
    def gradients(w1, b1, w2, b2, x, labels):
        """Mean over the batch of the gradients for (w1, b1, w2, b2)."""
        total = [np.zeros_like(p) for p in (w1, b1, w2, b2)]
        for e in range(len(x)):
            h = np.tanh(w1 @ x[e] + b1)
            out = np.tanh(w2 @ h + b2)
            d2 = softmax_gradient(out.copy(), labels[e]) * (1 - out**2)
            d1 = (w2.T @ d2) * (1 - h**2)
            for k, g in enumerate((np.outer(d1, x[e]), d1, np.outer(d2, h), d2)):
                total[k] += g / len(x)
        return total


def partpsp_perturbation(params, x, labels, *, lr_local, lr_shared, clip):
    """Algorithm 2, lines 3 to 6, for one node sharing its first layer: the new local parameters and the perturbation."""
    w1, b1, w2, b2 = params
    _, _, g_w2, g_b2 = TinyMLP.gradients(w1, b1, w2, b2, x, labels)
    w2, b2 = w2 - lr_local * g_w2, b2 - lr_local * g_b2
    g_w1, g_b1, _, _ = TinyMLP.gradients(w1, b1, w2, b2, x, labels)
    g = np.concatenate([g_w1.ravel(), g_b1])
    g = g / max(1.0, np.abs(g).sum() / clip)
    return (w2, b2), -lr_shared * g
