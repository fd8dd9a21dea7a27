"""Speed of lmcore beside what else its users could pick, on one device, in one run.

    python benchmarks/speed.py                       # everything that there is time for, to results/h200/speed.json
    python benchmarks/speed.py --only step decode    # some groups, or cells by name
    python benchmarks/speed.py --toy --out runs/toy/speed.json

A cell is one piece of work: its contestants are built, checked against the definition and then timed turn by turn, in
a process of the cell's own. What is done is written down at once and not done again.
"""

import sys

import tyro
from speed.command import main

from lmcore.errors import UserError

if __name__ == "__main__":
    try:
        tyro.cli(main)
    except UserError as error:
        sys.exit(str(error))
