"""Masks and biases of a model, read back as Regard's own masks and biases."""
