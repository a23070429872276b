"""The commands of the translation lab. Each parses its options, calls one function, and prints the result."""
