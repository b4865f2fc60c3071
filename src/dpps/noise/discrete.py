"""What whole-number noise on a grid costs, measured against the continuous noise that accountants know."""

import math

from dpps.errors import UsageError


def discrete_laplace_epsilon(sensitivity: float, scale: float) -> float:
    """The pure epsilon to charge of discrete Laplace noise, P(k) ∝ exp(-|k|/t), both arguments in grid units.

    By itself the mechanism on integers has pure epsilon m/t, m being the sensitivity, but its privacy loss is
    a little more concentrated on that extreme than continuous Laplace noise. Claim: the shift m of discrete
    noise is dominated by the shift m + 2t ln cosh(1/2t) <= m + 1/(4t) of continuous Laplace noise of scale t,
    so the charge m/t + 1/(4t²) covers every accountant.

    Proof. Likelihood ratios are monotone, so the vertices of the discrete curve (false alarm, power) are the
    threshold tests Z >= k. With r = e^(-1/t): P(Z >= k) = r^k/(1+r) for k >= 1 and 1 - r^(1-k)/(1+r) for k <=
    0. Put c = -t ln((1+r)/2) = 1/2 - t ln cosh(1/2t), in [0, 1/2]. For continuous X: P(X >= k - c) = P(Z >=
    k) for k >= 1 and P(X >= k - 1 + c) = P(Z >= k) for k <= 0. A vertex with k >= 1 and k - m <= 0 has power
    P(Z >= k - m); the continuous shift that reaches it is (k - c) - (k - m - 1 + c) = m + 1 - 2c = m + 2t ln
    cosh(1/2t). When k and k - m lie on the same side, the shift m reaches it. The continuous curve is
    concave, so it lies above the chords between vertices too. Vertices go to vertices, so the argument for
    vectors in the module's docstring holds as well. ∎
    """
    return sensitivity / scale + 1 / (4 * scale * scale)


def discrete_gaussian_multiplier(sigma: float, sensitivity: float) -> float:
    """The ``Charge.noise_multiplier`` of discrete Gaussian noise, both arguments in grid units.

    It is charged as the continuous Gaussian of variance sigma² - 1/12: rounding that one to integers gives
    back the variance 1/12. What remains between the two is :func:`discrete_gaussian_slack`.
    """
    _check_grid(sigma)
    return math.sqrt(sigma * sigma - 1 / 12) / sensitivity


def discrete_gaussian_slack(sigma: float, coordinates: int, rounds: int) -> float:
    """Total variation distance to pass as ``distance`` when discrete Gaussian noise is charged as continuous.

    Z has P(k) ∝ exp(-k²/2σ²) on integers; Y = round(X), X normal with variance s² = σ² - 1/12. Adding Y to
    integers is rounding after adding X, so Y costs what X costs, sampled or not. Claim: for σ >= 64 the
    distance of Z and Y is at most 2B + 2ζ with c = 14, ζ = 3 e^(-c²/2) and B = c²/(288 s⁴) + (c²σ²/(4s⁴) +
    1/(2s²))²/8, about 315/σ⁴.

    Proof. Put w = 1/(2s²), z = k/(2s²). Then P(Y=k) = const · exp(-k²/2s²) I(k), I(k) = ∫ cosh(2zu) exp(-wu²)
    du over |u| <= 1/2. On |k| <= cσ: |z| <= 1/8 and w <= 2⁻¹². Taylor with remainder, using ∫u² = 1/12 and
    ∫u⁴ = 1/80: I = 1 + z²/6 - w/12 + E, |E| <= 1.01 z⁴/24 + z²w/40 + 1.01 w²/160, and |ln I - (I-1)| <=
    (I-1)², so |ln I - z²/6 + w/12| <= (z² + w)²/8. Since -k²/2s² + k²/2σ² = -k²/(24 s²σ²) and z²/6 = k²/(24
    s⁴), the rest is k²/(288 s⁴σ²) <= c²/(288 s⁴): the choice of s cancels the leading term. So
    ln(P(Y=k)/P(Z=k)) is a constant plus at most B either way. Both tails beyond cσ are below ζ (P(|Z| >= cσ)
    <= 2e^(-c²/2), and rounding moves X by 1/2), so the constant is at most B - ln(1-ζ) and the ratio at most
    e^(2B)/(1-ζ); half its distance from 1, plus the tails, is below 2B + 2ζ. Fresh noise is independent of
    all before it, so distances add over coordinates and rounds. ∎
    """
    _check_grid(sigma)
    c, s2 = 14.0, sigma * sigma - 1 / 12
    b = c * c / (288 * s2 * s2) + (c * c * sigma * sigma / (4 * s2 * s2) + 1 / (2 * s2)) ** 2 / 8
    return min(1.0, coordinates * rounds * (2 * b + 6 * math.exp(-c * c / 2)))


def _check_grid(sigma: float) -> None:
    if not sigma >= 64:
        raise UsageError(
            f"discrete Gaussian noise of {sigma} grid steps is too coarse: use a grid of sigma/64 or finer"
        )
