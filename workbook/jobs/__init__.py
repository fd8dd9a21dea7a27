"""The workbook as jobs: rendering scripts, submitting them in order, and going on after a time limit."""
