"""What every package uses, and what knows of none: errors, checks of arguments, sizes, spans, files, versions."""
