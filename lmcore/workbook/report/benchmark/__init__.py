"""What notebook 04 answers and draws."""
