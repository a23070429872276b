"""Speed and memory, measured in one run: mechanisms beside their peers, and suites of goals.

`python -m benchmarks --list` names all of them. `mechanisms` runs the cases of `cases/` beside `peers/`; a file with
`goals()` is a suite of goals. `gpu/` has the measurements that need a GPU.
"""
