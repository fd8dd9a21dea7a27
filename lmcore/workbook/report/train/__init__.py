"""What notebook 02 answers and draws."""
