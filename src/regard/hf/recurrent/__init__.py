"""Recurrent layers of transformers as linear maps: their tensors, read from the calls of a running model."""
