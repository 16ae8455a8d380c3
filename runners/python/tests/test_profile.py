"""Declarations and configurations: the JSON that the harness reads and writes."""

import json
import sys
import unittest

from shardcheck import Configuration, Contract, Conventions, Operation, PerTile, Profile
from shardcheck.profile import OPERATIONS
from tests.peer import CONFIGURATION

CONTRACT_FIELDS = {
    *("u_acc", "depth", "kexp", "tile_min", "p_floor", "exact_max", "l_rounded"),
    *("partial", "merge", "lse_rel", "output"),
}


class Declarations(unittest.TestCase):
    def test_a_contract_has_exactly_the_fields_of_the_harness(self):
        self.assertEqual(set(Contract.f32().to_json()), CONTRACT_FIELDS)
        self.assertEqual(set(Contract.bf16().to_json()), CONTRACT_FIELDS | {"p_dtype"})

    def test_the_usual_contracts_say_what_they_are_named_after(self):
        usual = Contract.bf16(merge="ag_rs_bf16").to_json()
        self.assertEqual(usual["u_acc"], 2.0**-23)
        self.assertEqual(usual["depth"], {"per_tile": {"tile": 16, "extra": 16}})
        self.assertEqual((usual["p_dtype"], usual["partial"], usual["output"]), ("bf16", "bf16", "bf16"))
        self.assertEqual((usual["merge"], usual["tile_min"]), ("ag_rs_bf16", 32))
        plain = Contract.f32(output="bf16", depth=PerTile(64, 24)).to_json()
        self.assertEqual((plain["u_acc"], plain["partial"], plain["output"]), (2.0**-24, "f32", "bf16"))
        self.assertEqual(plain["depth"], {"per_tile": {"tile": 64, "extra": 24}})
        self.assertEqual(Contract.f32().to_json()["depth"], "any")

    def test_a_word_that_is_not_known_is_refused_with_the_known_ones(self):
        for make, words in (
            (lambda: Contract.f32(merge="ring"), "ag_rs_bf16"),
            (lambda: Contract.f32(depth="some"), "any"),
            (lambda: Contract.f32(output="fp32"), "bf16"),
            (lambda: Contract.f32(p_dtype="half"), "e4m3fn"),
            (lambda: Conventions(lse_base="10"), "two"),
            (lambda: Conventions(empty_partial="one"), "undefined"),
            (lambda: Conventions(lane_orders=["lo"]), "hi_lo"),
            (lambda: Conventions(scale_rounding="floor"), "reciprocal"),
            (lambda: Conventions(overflow="clip"), "saturate"),
            (lambda: Profile(engine="e", version="1", operations={"attend": Operation()}), "decode"),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                make()

    def test_f16_is_declared_by_operation_with_the_arithmetic_of_its_contract_in_f16(self):
        half = Contract.bf16(merge="ag_rs_bf16").in_f16()
        self.assertEqual((half.p_dtype, half.partial, half.output, half.merge), ("f16", "f16", "f16", "ag_rs_f16"))
        self.assertEqual((half.p_floor, half.in_f16()), (2.0**-25, half))
        plain = Contract.f32()
        self.assertEqual(plain.in_f16(), plain)
        declared = Operation(contract=Contract.bf16()).with_f16().to_json()
        self.assertEqual(declared["dtypes"], {"f16": Contract.bf16().in_f16().to_json()})
        self.assertEqual(Operation().with_f16().to_json()["dtypes"], {"f16": None})
        with self.assertRaisesRegex(ValueError, "f16"):
            Operation(dtypes={"f64": None})

    def test_activations_are_bf16_unless_the_configuration_says_f16(self):
        self.assertEqual(Configuration.from_json(CONFIGURATION).dtype, "bf16")
        self.assertEqual(Configuration.from_json(CONFIGURATION | {"dtype": "f16"}).dtype, "f16")

    def test_a_profile_has_a_place_for_everything_and_is_plain_json(self):
        operations = {name: Operation() for name in OPERATIONS}
        profile = Profile(engine="e", version="1", operations=operations).to_json()
        self.assertEqual(json.loads(json.dumps(profile, allow_nan=False)), profile)
        fields = "engine version revision files devices own_steps replaced rule_sets operations"
        self.assertEqual(set(profile), set(fields.split()))
        operation = profile["operations"]["layout"]
        self.assertEqual(set(operation), {"contract", "conventions", "observables", "absent"})
        self.assertIsNone(operation["contract"])
        conventions = {"lse_base", "empty_partial", "lane_orders", "scale_rounding", "overflow"}
        self.assertEqual(set(operation["conventions"]), conventions)


class Configurations(unittest.TestCase):
    def test_derived_sizes_follow_from_the_given_ones(self):
        mla = Configuration.from_json({**CONFIGURATION, "tp": 8, "dcp": 4, "heads_per_rank": 3})
        self.assertEqual((mla.gathered_heads, mla.total_heads, mla.virtual_block_tokens), (12, 24, 16))
        self.assertEqual((mla.qk_dim, mla.value_dim, mla.kv_heads, mla.attention.is_mla), (6, 4, 1, True))
        attention = {"kind": "gqa", "kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
        gqa = Configuration.from_json({**CONFIGURATION, "attention": attention})
        self.assertEqual((gqa.qk_dim, gqa.value_dim, gqa.kv_heads, gqa.attention.is_mla), (8, 6, 2, False))

    def test_fields_of_a_later_version_are_ignored_and_missing_ones_are_not(self):
        attention = {**CONFIGURATION["attention"], "later": 1}
        read = Configuration.from_json({**CONFIGURATION, "attention": attention, "later": True})
        self.assertEqual(read, Configuration.from_json(CONFIGURATION))
        lacking = {key: value for key, value in CONFIGURATION.items() if key != "blocks"}
        with self.assertRaisesRegex(TypeError, "blocks"):
            Configuration.from_json(lacking)


if __name__ == "__main__":
    sys.exit(unittest.main())
