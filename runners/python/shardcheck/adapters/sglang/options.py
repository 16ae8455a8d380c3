"""Choices between functions of the engine, and sizes that its users set: options of the adapter."""

from __future__ import annotations

from dataclasses import dataclass, fields

_CHOICES = {
    "merge": ("reduced", "scattered"),
    "reads": ("backend", "planner", "pages"),
    "slots": ("backend", "localize", "sparse"),
}


@dataclass(frozen=True)
class Options:
    """Which of the engine's functions run where it has more than one, and how many splits a row has at most."""

    merge: str = "reduced"
    reads: str = "backend"
    slots: str = "backend"
    splits: int = 2

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}")
        if self.splits < 1:
            raise ValueError(f"--splits is {self.splits}: a row has one at least")

    @staticmethod
    def of(given: dict[str, str]) -> Options:
        """Options from the text of a command line."""
        known = {field.name for field in fields(Options)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"there is no option --{unknown[0]}: use one of {', '.join(sorted(known))}")
        return Options(**{name: int(value) if name == "splits" else value for name, value in given.items()})
