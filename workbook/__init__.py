"""The workbook beside lmcore: notebooks executed without a browser, reports, jobs, and the hand-in."""

import sys

# jsonschema, with which nbformat validates notebooks, checks addresses of the format "iri" by this package where it is
# installed, as it is with JupyterLab. No notebook has one, and the grammar alone would take seconds at each start.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
