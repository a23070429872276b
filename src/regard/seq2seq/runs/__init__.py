"""The folder of a training run: its configuration, weights and metrics, written whole and read back."""

from regard.seq2seq.runs.run import Run, load_run

__all__ = ["Run", "load_run"]
