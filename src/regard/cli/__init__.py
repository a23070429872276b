"""The command line: `regard --help` lists its commands."""
