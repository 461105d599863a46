"""trainapp trains any PyTorch model on whatever memory there is, with the same result."""

__version__ = "0.1.0"
