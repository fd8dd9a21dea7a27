"""What runs the workbook: notebooks executed without a browser, reports, jobs, and the hand-in."""

import sys

# nbformat imports jsonschema, which imports this package where it is installed, whose import compiles a grammar of
# international web addresses for seconds. Notebooks have none, and jsonschema does without it.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
