"""`profile_corpus` reads a whole corpus with a model: the statistics of every head over all documents."""

from regard.profiling.corpus import profile_corpus
from regard.profiling.corpus_profile import CorpusProfile

__all__ = ["CorpusProfile", "profile_corpus"]
