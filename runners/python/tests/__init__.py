"""Tests of the adapter SDK: `python -m unittest discover -s tests -t .` in this folder."""
