"""Text files and streams, the texts of the package, and the cache of downloads."""
