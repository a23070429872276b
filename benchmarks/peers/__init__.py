"""The peers of Regard: runs of other libraries. A library is imported only if it is measured."""
