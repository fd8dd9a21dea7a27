"""Tables, sentences and figures of notebook 05: where the time of a step goes."""
