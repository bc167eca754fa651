"""entrenar-py: falsify distributed trainers before people trust them."""

__version__ = "0.1.0"
