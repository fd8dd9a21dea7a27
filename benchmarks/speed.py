"""Speed of lmcore beside what else its users could pick, on one device, in one run.

    python benchmarks/speed.py                       # everything that there is time for, to results/h200/speed.json
    python benchmarks/speed.py --only step decode    # some groups, or cells by name
    python benchmarks/speed.py --toy --out runs/toy/speed.json

A cell is one piece of work: its contestants are built, checked against the definition and then timed turn by turn, in
a process of the cell's own. What is done is written down at once and not done again.
"""

from common import command
from speed.command import main

if __name__ == "__main__":
    command(main)
