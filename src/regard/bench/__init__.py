"""Measuring Regard beside its peers: cases, how they are run, and what is told of them. `regard bench` is its end."""
