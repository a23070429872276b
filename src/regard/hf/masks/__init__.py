"""Reads the mask tensors, mask functions and bias tensors of a model back as masks and biases of Regard."""
