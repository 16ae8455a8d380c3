"""Stands for the package flashinfer where there is no GPU: the functions that its adapter calls, in plain torch, with the package's shapes and its LSEs in base 2."""

__version__ = "0"
