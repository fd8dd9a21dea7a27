"""`python -m workbook` is `workbook`."""

import sys

from workbook.cli import main

if __name__ == "__main__":
    sys.exit(main())
