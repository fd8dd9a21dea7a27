"""`python -m lmcore` is `lmcore`."""

import sys

from lmcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
