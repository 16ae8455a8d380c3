"""Takes functions of a release out of their file by name, whatever that file imports: torch, numpy and Triton are enough to run them, on a CPU."""

from __future__ import annotations

import ast
import importlib.util
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

# before anything imports Triton
os.environ["TRITON_INTERPRET"] = "1"

HEAD = """from __future__ import annotations
from typing import Optional
import numpy as np
import torch
import triton
import triton.language as tl
"""


def cut(path: Path, *names: str) -> SimpleNamespace:
    """Functions and methods of a file by name, in a module of their own; those that it doesn't have are left out."""
    text = path.read_text()
    found = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    lines = text.splitlines()
    bodies = []
    for node in found:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        bodies.append("\n".join(line[node.col_offset :] for line in lines[first : node.end_lineno]))
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(HEAD + "\n\n".join(bodies) + "\n")
    spec = importlib.util.spec_from_file_location("cut", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**{name: getattr(module, name) for name in names if hasattr(module, name)})
