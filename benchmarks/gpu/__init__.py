"""What Regard does on a GPU: `python -m benchmarks.gpu` measures it in parts and writes the tables of the pages."""
