"""The exercises of all notebooks: catalogue.yaml says what is asked; the modules here have answers to it."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml

from lmcore import functional, model, optimizer
from workbook.exercises import ranks
from workbook.exercises.chapters import build, generate, measure, scale, train
from workbook.exercises.exercise import EXERCISES, Exercise, normal

KNOWN = {"math": math, "partial": partial, "np": np, "torch": torch, "normal": normal, "ranks": ranks}
KNOWN |= {"functional": functional, "model": model, "optimizer": optimizer}
CHAPTERS = {1: build, 2: train, 3: generate} | dict.fromkeys((4, 5, 6), measure) | dict.fromkeys((7, 8, 9, 10), scale)

CATALOGUE = Path(__file__).parents[1] / "catalogue.yaml"
for notebook, entries in yaml.safe_load(CATALOGUE.read_text(encoding="utf-8")).items():
    names = KNOWN | vars(CHAPTERS[int(notebook[:2])])
    for name, entry in entries.items():
        EXERCISES[name] = Exercise.of_entry(name, notebook, names, entry)
