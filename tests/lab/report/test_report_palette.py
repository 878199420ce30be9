"""Whoever looks at the report can tell its series apart, with any kind of colour vision, on light and on dark."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kalmannorm.lab.report.palette import DARK, LIGHT, colours, filled, looks, shade

# Full colour vision, and the dichromacies as linear maps of light (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
SCHEMES = {"light": (LIGHT, "#ffffff"), "dark": (DARK, "#191d22")}


def light(colour: str) -> np.ndarray:
    """Linear red, green and blue."""
    shares = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    cones = [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
    axes = [[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_series_stay_apart(scheme, sight):
    seen = [oklab(np.array(SIGHTS[sight]) @ light(colour)) for colour in SCHEMES[scheme][0]]
    assert min(100 * np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_series_stands_out_from_its_ground(scheme):
    series, ground = SCHEMES[scheme]
    weights = np.array([0.2126, 0.7152, 0.0722])
    for colour in series:
        dim, bright = sorted((light(colour) @ weights, light(ground) @ weights))
        assert (bright + 0.05) / (dim + 0.05) >= 3, colour


def test_a_method_keeps_its_colour_and_rows_have_different_ones():
    assert colours(["bn", "bkn"]) == [colours(["bn"])[0], colours(["bkn"])[0]]
    many = colours(["bn", "bkn", "bkn", "bkn-learned", "gn", "bkn"])
    assert len(set(many)) == 6 and many[3] == colours(["bkn-learned"])[0]
    assert len({i % len(LIGHT) for i in many}) == 6


@pytest.mark.parametrize(
    "methods",
    [["bn"] * 3 + ["brn", "gn"] + ["bkn"] * 3 + ["bkn-learned"] * 2, ["bkn"] * 40, ["a", "b", "c"] * 5],
    ids=["more rows than colours", "one method", "methods of no name"],
)
def test_no_two_rows_look_alike(methods):
    given = colours(methods)
    drawn = [looks()[i] for i in given]
    assert len(set(drawn)) == len(methods)
    fillings = [(shade(i), filled(i)) for i in given[:24]]  # bars and swatches have no dash
    assert len(set(fillings)) == len(fillings)
