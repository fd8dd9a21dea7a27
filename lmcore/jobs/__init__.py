"""Jobs of a batch system: scripts, submission, requeueing, sweeps as arrays, and what has become of them."""
