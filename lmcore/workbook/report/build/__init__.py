"""What notebook 01 answers and draws."""
