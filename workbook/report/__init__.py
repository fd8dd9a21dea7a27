"""Tables, figures, answers and the writeup, made from what runs have written down."""
