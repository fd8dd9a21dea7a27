"""What notebook 03 measures on samples, answers and draws."""
