"""The schema of the protocol holds what is really sent, and refuses what is not."""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path

try:
    import jsonschema
except ImportError:
    jsonschema = None
    print("SKIPPED: the schema of the protocol: jsonschema is not installed", file=sys.stderr)

DOCS = Path(__file__).resolve().parents[3] / "docs"


@unittest.skipIf(jsonschema is None, "jsonschema is not installed")
class SchemaOfTheProtocol(unittest.TestCase):
    def setUp(self) -> None:
        schema = json.loads((DOCS / "protocol.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        self.validator = jsonschema.Draft202012Validator(schema)
        self.examples = [json.loads(line) for line in (DOCS / "protocol.examples.jsonl").read_text().splitlines()]

    def test_every_example_is_valid(self) -> None:
        self.assertGreater(len(self.examples), 10)
        for example in self.examples:
            errors = [error.message for error in self.validator.iter_errors(example)]
            self.assertEqual(errors, [], example["type"])

    def test_a_message_without_any_one_of_its_own_fields_is_refused(self) -> None:
        for example in self.examples:
            for field in ("type", "id", "session", "operation", "status", "protocol", "profile", "reason", "class"):
                if field in example:
                    less = {key: value for key, value in example.items() if key != field}
                    self.assertFalse(self.validator.is_valid(less), f"{example['type']} without {field}")

    def test_the_declarations_of_the_examples_in_python_are_valid(self) -> None:
        from shardcheck.loading import load_engine, profile_of

        example = DOCS.parent / "runners/python/examples/numpy_dcp.py"
        profile = profile_of(load_engine(f"{example}:NumpyDcp", {}))
        self.assertIn("decode", profile.operations)
        hello = {"type": "hello", "token": "t", "protocol": [1, 1], "profile": profile.to_json()}
        self.assertEqual([error.message for error in self.validator.iter_errors(hello)], [])
