"""The pictures that explain: they are what docs/pictures.py draws, and notebooks show each of them."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from workbook.notebook import read_notebook

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "docs"))
import pictures  # noqa: E402 - a script

NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    pictures.draw((), folder)
    return folder


@pytest.mark.parametrize("name", pictures.pictures())
def test_a_committed_picture_is_what_the_module_draws(drawn, name):
    made, committed = ((folder / f"{name}.svg").read_text() for folder in (drawn, pictures.FOLDER))
    assert NUMBER.sub("0", made) == NUMBER.sub("0", committed)
    np.testing.assert_allclose(*(np.array(NUMBER.findall(text), float) for text in (made, committed)), atol=0.02)


def test_each_picture_is_in_a_notebook_and_none_is_missing():
    cells = (cell.source for path in (PROJECT / "notebooks").glob("*.ipynb") for cell in read_notebook(path).cells)
    shown = re.findall(r"!\[[^\]]+\]\(\.\./figures/pictures/(\w+)\.svg\)", "\n".join(cells))
    assert sorted(shown) == sorted(pictures.pictures()) == sorted(path.stem for path in pictures.FOLDER.glob("*"))
