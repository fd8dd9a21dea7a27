"""A polynomial through measured points."""

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Fit:
    """A polynomial through measured points by least squares of the relative errors."""

    coefficients: tuple[float, ...]
    """Of the powers 0, 1, …"""
    residual: float
    """Largest |fit / value - 1| of the points."""


def fitted(x: pd.Series, y: pd.Series, degree: int) -> Fit:
    """y as a polynomial in x; every point counts by its relative error, so that small values are met as well."""
    x, y = x.to_numpy(float), y.to_numpy(float)
    powers = np.stack([x**power for power in range(degree + 1)], axis=1) / y[:, None]
    scale = np.abs(powers).max(axis=0)  # columns of like size: squares of contexts would drown the constant
    solution = np.linalg.lstsq(powers / scale, np.ones(len(y)), rcond=None)[0] / scale
    return Fit(tuple(solution), float(np.abs(powers @ solution - 1).max()))
