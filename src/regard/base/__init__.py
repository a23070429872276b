"""The lowest layer, which imports no other package: errors, checks of arguments, sizes, spans, files, versions."""
