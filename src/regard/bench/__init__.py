"""Measures Regard against other libraries: the cases, the runner and the report of `regard bench`."""
