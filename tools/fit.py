#!/usr/bin/env python3
"""The coefficients of the polynomials in core/lane.h.

    tools/fit.py        # needs numpy and mpmath

Each line is a function, the largest error of the fit relative to what it approximates, and the coefficients from the
constant term up. A fit is a minimax one, by iteratively reweighted least squares on Chebyshev nodes.
"""
import mpmath as mp
import numpy as np

mp.mp.dps = 40


def fit(f, low, high, degree, weight, nodes=400):
    """The polynomial nearest to f on [low, high] where an error at x counts weight(x) times; and that error."""
    k = np.arange(nodes)
    x = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (k + 0.5) / nodes)
    y = np.array([float(f(mp.mpf(float(t)))) for t in x])
    w = np.array([float(weight(mp.mpf(float(t)))) for t in x])
    powers = np.vander(x, degree + 1, increasing=True)
    importance = np.ones(nodes)
    for _ in range(60):
        rows = w * np.sqrt(importance)
        c = np.linalg.lstsq(powers * rows[:, None], y * rows, rcond=None)[0]
        error = np.abs((powers @ c - y) * w)
        importance = importance * (error / error.max() + 1e-3)
        importance /= importance.sum()
    return c, error.max()


def show(name, *arguments, **options):
    c, error = fit(*arguments, **options)
    print("{:6} error {:.2g}: {}".format(name, error, ", ".join("{:.9e}f".format(v) for v in c)))


def main():
    half = mp.mpf(0.5)
    # e^r = 1 + r + r^2 p(r), |r| <= ln 2 / 2
    show("exp", lambda r: (mp.e**r - 1 - r) / r**2 if abs(r) > 1e-9 else half, -0.3475, 0.3475, 4,
         lambda r: r * r / mp.e**r)
    # tanh x = x + x s p(s), s = x^2, x <= 0.625
    show("tanh", lambda s: (mp.tanh(mp.sqrt(s)) / mp.sqrt(s) - 1) / s, 1e-6, 0.625**2, 4, lambda s: s)
    # erf x = 2 x / sqrt(pi) + x p(s), s = x^2, x <= 1; beyond it, log(erfc x) = p(x)
    show("erf", lambda s: mp.erf(mp.sqrt(s)) / mp.sqrt(s) - 2 / mp.sqrt(mp.pi), 1e-7, 1.0, 6, lambda s: 1)
    show("erfc", lambda t: mp.log(mp.erfc(t)), 1.0, 4.0, 6, lambda t: mp.erfc(t) / mp.erf(t))
    # log(1 + r) = r - r^2 / 2 + r^3 p(r), sqrt(1/2) <= 1 + r <= sqrt(2)
    show("log", lambda r: (mp.log(1 + r) - r + r * r / 2) / r**3, -0.2929, 0.41422, 7,
         lambda r: r**3 / mp.log(1 + r), nodes=401)


if __name__ == "__main__":
    main()
