"""Adapters of published engines, and what they share: a loader of single modules, ranks in one process, Triton's interpreter."""
