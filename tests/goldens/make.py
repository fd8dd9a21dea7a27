"""Writes the goldens anew from the code of a checkout: `python tests/goldens/make.py [--checkout FOLDER] [PART ...]`.

Without PART everything. After a deliberate change, only the part that changed, from this checkout: the difference that
git then shows is what the commit has to explain.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Puts the checkout's library first on the path, then computes and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=HERE.parents[1], help="whose lmcore, tests and results")
    parser.add_argument("parts", nargs="*", help="default: all")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LMCORE_GOLDENS_PROJECT"] = str(checkout)
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    os.chdir(HERE.parents[1])  # paths in the records are relative to it

    import golden_library
    import golden_parts
    import golden_runs
    import torch

    torch.set_num_threads(1)
    code = Path(sys.modules["lmcore"].__file__).resolve()
    assert checkout in code.parents, f"lmcore was imported from {code}"
    source = golden_library.environment()
    known = {"run_folders": lambda: golden_runs.write_runs(HERE.parents[1])} | golden_parts.writers(source)
    unknown = [part for part in options.parts if part not in known]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    for part in options.parts or known:
        known[part]()
        print(f"{part}: written at {str(source['git_commit'])[:7]}{' with changes' if source['git_dirty'] else ''}")


if __name__ == "__main__":
    main()
