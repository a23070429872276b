"""The folder of a training run: its configuration, weights and metrics, written whole and read back."""

from regard.lab.runs.run import Run, load_pretrained, load_run, pretrained_runs

__all__ = ["Run", "load_pretrained", "load_run", "pretrained_runs"]
