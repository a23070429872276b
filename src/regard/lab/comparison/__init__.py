"""Comparisons of systems: `study` says what is compared, `workers` runs the trials, one process for each.

`import regard.lab` does not load these modules, since they need Lightning.
"""
