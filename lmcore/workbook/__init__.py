"""What runs the workbook: notebooks executed without a browser, reports, jobs, and the hand-in."""
