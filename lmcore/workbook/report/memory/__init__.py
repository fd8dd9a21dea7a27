"""What notebook 06 answers and draws."""
