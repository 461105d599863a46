"""trainapp trains any PyTorch model in whatever memory is available, with the same result."""

__version__ = "0.1.0"
