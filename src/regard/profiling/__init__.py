"""Profiles of whole corpora: each document is measured, and all are folded into one table of heads."""
