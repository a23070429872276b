"""The version of the installed package, which scripts/package_version.py takes from the tag."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("regard")
except PackageNotFoundError:  # the source is read without being installed
    __version__ = "0.0.0"
