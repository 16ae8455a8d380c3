"""The adapter process from outside: a peer plays the harness."""

import json
import os
import signal
import struct
import subprocess
import sys
import unittest

import numpy as np

from shardcheck import Tensor, Unsupported
from tests.peer import CONFIGURATION, ROOT, TOKEN, Ended, Harness, i32

ECHO = ["odd_engines:Echo"]
BATCH = {"query_start_loc": i32(0, 1), "block_table": Tensor("i32", np.zeros((1, 2), np.int32))}
QUERY = {"query": Tensor("bf16", np.zeros((1, 2, 6), np.uint16))}


def batch(length: int) -> dict[str, Tensor]:
    """Inputs of an attention step."""
    return {**QUERY, **BATCH, "seq_lens": i32(length)}


def run_command(*words: str, **variables: str) -> subprocess.CompletedProcess:
    """The command without a harness."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SHARDCHECK_")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **variables}
    command = [sys.executable, "-m", "shardcheck.adapter", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)


class Handshake(unittest.TestCase):
    def test_hello_says_token_versions_and_profile(self):
        with Harness([*ECHO, "--flavour", "sweet", "--top-k=3"]) as harness:
            hello = harness.start()
        self.assertEqual((hello["type"], hello["token"], hello["protocol"]), ("hello", TOKEN, [1, 1]))
        self.assertIn("shardcheck", hello["sdk"])
        profile = hello["profile"]
        self.assertEqual((profile["engine"], profile["version"], profile["revision"]), ("echo", "0.0", "abc"))
        self.assertEqual(profile["devices"], ["sweet", "3"])
        self.assertEqual(
            (profile["own_steps"], profile["replaced"]), (["nothing of its own"], ["everything"])
        )
        self.assertEqual(profile["rule_sets"], [])
        self.assertEqual(set(profile["files"]), {"odd_engines.py", "numpy/__init__.py", "tests/peer.py"})
        self.assertTrue(all(len(digest) == 64 for digest in profile["files"].values()))
        self.assertEqual(profile["operations"]["layout"]["absent"], ["units"])
        self.assertEqual(profile["operations"]["decode"]["contract"]["depth"], "any")

    def test_a_path_to_a_file_is_an_engine_too(self):
        with Harness(["tests/odd_engines.py:Echo"]) as harness:
            self.assertEqual(harness.start()["profile"]["engine"], "echo")

    def test_a_refusal_ends_the_process_with_its_reason(self):
        with Harness(ECHO) as harness:
            harness.hello()
            harness.send({"type": "refused", "reason": "another token"})
            self.assertEqual(harness.exit_code(), 1)
            self.assertIn("another token", harness.log())

    def test_bye_ends_it_well_and_closes_what_is_open(self):
        with Harness(ECHO) as harness:
            harness.start()
            harness.open()
            harness.send({"type": "bye"})
            self.assertEqual(harness.exit_code(), 0)
            self.assertIn("session of 2 ranks closed", harness.log())
            self.assertIn("engine closed", harness.log())

    def test_a_closed_socket_ends_it_well(self):
        with Harness(ECHO) as harness:
            harness.start()
            harness.hang_up()
            self.assertEqual(harness.exit_code(), 0)

    def test_sigterm_ends_it_well_also_within_a_step(self):
        with Harness(ECHO) as harness:
            harness.start()
            harness.open()
            harness.send(
                {
                    "type": "step",
                    "id": 2,
                    "session": 1,
                    "operation": {"operation": "attend", "mask": "bidirectional"},
                },
                batch(1),
            )
            harness.wait_for_record(1, 2)
            harness.process.send_signal(signal.SIGTERM)
            self.assertEqual(harness.exit_code(), 0)
            self.assertIn("session of 2 ranks closed", harness.log())
            self.assertNotIn("Traceback", harness.log())


class KvGroups(unittest.TestCase):
    READ = {"type": "step", "session": 1, "operation": {"operation": "read_cache"}, "kind": "read_cache"}
    SECOND = {**READ, "operation": {"operation": "in_group", "group": 1, "step": READ["operation"]}}

    def test_a_step_reaches_the_group_that_it_names(self):
        with Harness(["odd_engines:TwoGroups"]) as harness:
            self.assertTrue(harness.start()["profile"]["second_group"])
            group = {**CONFIGURATION, "dcp": 1, "block_size": 32}
            self.assertEqual(harness.open(second_group=group)["status"], "ok")
            for header, expected in [(self.READ, [0, CONFIGURATION["block_size"]]), (self.SECOND, [1, 32])]:
                reply, outputs = harness.ask(header)
                self.assertEqual(reply["status"], "ok", reply)
                self.assertEqual(outputs["key_cache"].numpy().tolist(), [expected])

    def test_a_method_that_does_not_ask_for_its_group_is_not_taken_for_the_first(self):
        with Harness(["odd_engines:TwoGroups"]) as harness:
            harness.start()
            harness.open(second_group=CONFIGURATION)
            load = {"operation": "in_group", "group": 1, "step": {"operation": "load_cache"}}
            cache = {"key_cache": Tensor("u8", np.ones(4, np.uint8))}
            header = {"type": "step", "session": 1, "operation": load, "kind": "load_cache"}
            reply, _ = harness.ask(header, cache)
            self.assertEqual(reply["status"], "error", reply)
            self.assertIn("group", reply["text"])

    def test_an_engine_of_one_group_says_so(self):
        with Harness(ECHO) as harness:
            self.assertNotIn("second_group", harness.start()["profile"])
            harness.open(second_group=CONFIGURATION)
            reply, _ = harness.ask(self.SECOND)
            self.assertEqual((reply["status"], reply["reason"]), ("unsupported", "echo has one KV group"))


class BadFrames(unittest.TestCase):
    def test_each_broken_rule_ends_the_process_and_is_named(self):
        text = b'{"type":"open","id":1}'
        frames = {
            b"HTTP" + bytes(12): "starts with",
            b"SCK1" + struct.pack("<IQ", 1, 0) + b"{": "header of 1 bytes",
            b"SCK1" + struct.pack("<IQ", 17 << 20, 0): "header of 17825792 bytes",
            b"SCK1" + struct.pack("<IQ", len(text), (64 << 20) + 1) + text: "payload of",
            b"SCK1" + struct.pack("<IQ", 3, 0) + b"[1]": "no JSON object",
            b"SCK1" + struct.pack("<IQ", 3, 0) + b"{1}": "no JSON",
            b"SCK1" + struct.pack("<IQ", len(text), 0) + text: "`open` without `session`",
            b"SCK1" + struct.pack("<IQ", 15, 0) + b'{"type":"open"}': "without `id`",
            b"SCK1" + struct.pack("<IQ", 22, 0) + b'{"type":"what","id":1}': "unknown type 'what'",
        }
        for frame, words in frames.items():
            with self.subTest(words), Harness(ECHO) as harness:
                harness.start()
                harness.send_bytes(frame)
                self.assertEqual(harness.exit_code(), 1)
                self.assertIn(words, harness.log())
                self.assertNotIn("Traceback", harness.log())

    def test_a_connection_that_ends_within_a_frame_is_said(self):
        with Harness(ECHO) as harness:
            harness.start()
            harness.send_bytes(b"SCK1" + struct.pack("<IQ", 100, 0) + b"{")
            harness.hang_up()
            self.assertEqual(harness.exit_code(), 1)
            self.assertIn("ended within the header", harness.log())

    def test_a_file_outside_of_the_folder_is_not_touched(self):
        for name in ("../harness.sock", "", "..", "sub/file", "not-there"):
            with self.subTest(name), Harness(ECHO) as harness:
                harness.start()
                harness.open()
                harness.send(
                    {
                        "type": "step",
                        "id": 2,
                        "session": 1,
                        "operation": {"operation": "pack_lse"},
                        "file": name,
                    }
                )
                self.assertEqual(harness.exit_code(), 1)
                self.assertIn("file", harness.log())
                self.assertTrue((harness.folder.parent / "harness.sock").exists())


class Questions(unittest.TestCase):
    def setUp(self):
        self.harness = self.enterContext(Harness(ECHO)) if hasattr(self, "enterContext") else Harness(ECHO)
        if not hasattr(self, "enterContext"):
            self.addCleanup(self.harness.__exit__)
        self.harness.start()

    def test_validation_is_unsupported_and_says_so(self):
        reply, _ = self.harness.ask({"type": "validate", "rules": "own", "settings": {}})
        self.assertEqual(reply["status"], "unsupported")
        self.assertIn("echo", reply["reason"])

    def test_open_may_refuse_and_may_fail_and_the_process_goes_on(self):
        self.assertEqual(self.harness.open(tp=3, dcp=3)["reason"], "three ranks are not a power of two")
        failed = self.harness.open(tp=5, dcp=5)
        self.assertEqual((failed["status"], failed["class"]), ("error", "crash"))
        self.assertTrue(failed["text"].startswith("RuntimeError: five is too much"), failed["text"])
        self.assertEqual(self.harness.open()["status"], "ok")

    def test_fields_that_are_not_known_are_ignored(self):
        self.assertEqual(self.harness.open(a_field_of_the_future=7)["status"], "ok")

    def test_an_operation_that_is_not_declared_is_unsupported(self):
        self.harness.open()
        reply, _ = self.harness.step("merge_states")
        self.assertEqual((reply["status"], reply["reason"]), ("unsupported", "echo has no merge_states"))

    def test_every_dtype_goes_there_and_comes_back(self):
        self.harness.open()
        for name in ("f64", "f32", "f16", "bf16", "e4m3fn", "e4m3fnuz", "e5m2", "i64", "i32", "u16", "u8"):
            sent = Tensor.from_f32(name, np.arange(6, dtype=np.float32).reshape(2, 3))
            reply, outputs = self.harness.step("pack_lse", {"lse": sent})
            self.assertEqual(reply["status"], "ok")
            self.assertEqual((outputs["same"].dtype, outputs["same"].shape), (name, (2, 3)))
            np.testing.assert_array_equal(outputs["same"].codes, sent.codes)
            self.assertEqual(outputs["sum"].codes[0], 15)

    def test_strided_views_are_seen_as_such(self):
        self.harness.open()
        memory = np.arange(8, dtype=np.float32)
        view = {"lse": {"dtype": "f32", "shape": [3, 2], "strides": [1, 3]}}
        inputs = {"lse": Tensor("u8", memory.view(np.uint8))}
        reply, outputs = self.harness.step("pack_lse", inputs, strided=view)
        self.assertEqual(reply["status"], "ok")
        np.testing.assert_array_equal(outputs["same"].codes, [[0, 3], [1, 4], [2, 5]])
        np.testing.assert_array_equal(outputs["strides"].codes, [1, 3])

    def test_strided_views_are_seen_wherever_their_bytes_lie(self):
        self.harness.open()
        memory = np.arange(6, dtype=np.float32)
        view = {"lse": {"dtype": "f32", "shape": [3, 2], "strides": [1, 3]}}
        for shift in range(1, 8):
            # "before" comes first in the data and is of the same width, so that the view starts at any byte
            inputs = {
                "before": Tensor("u8", np.ones(shift, np.uint8)),
                "lse": Tensor("u8", memory.view(np.uint8)),
            }
            reply, outputs = self.harness.step("pack_lse", inputs, strided=view)
            self.assertEqual(reply["status"], "ok")
            self.assertEqual(set(outputs), {"same", "strides", "sum", "before"})
            np.testing.assert_array_equal(outputs["same"].codes, [[0, 3], [1, 4], [2, 5]])

    def test_a_strided_view_beyond_its_bytes_ends_the_process(self):
        self.harness.open()
        view = {"lse": {"dtype": "f32", "shape": [3, 2], "strides": [1, 4]}}
        with self.assertRaises(Ended):
            self.harness.step("pack_lse", {"lse": Tensor("u8", np.zeros(24, np.uint8))}, strided=view)
        self.assertEqual(self.harness.exit_code(), 1)
        self.assertIn("reaches 28 bytes of 24", self.harness.log())

    def test_payloads_through_files_leave_nothing_behind(self):
        self.harness.open()
        cache = Tensor("f32", np.arange(1 << 19, dtype=np.float32))
        reply, outputs = self.harness.step("load_cache", {"key_cache": cache}, via_file=True)
        self.assertIn("file", reply)
        np.testing.assert_array_equal(outputs["twice"].codes, np.tile(cache.codes, 2))
        self.assertEqual(list(self.harness.folder.iterdir()), [])

    def test_outputs_go_inline_when_the_folder_takes_nothing(self):
        self.harness.open()
        os.rename(self.harness.folder, f"{self.harness.folder}-gone")
        reply, outputs = self.harness.step(
            "load_cache", {"key_cache": Tensor("u8", np.ones(1 << 20, np.uint8))}
        )
        self.assertNotIn("file", reply)
        self.assertEqual(outputs["twice"].shape, (2 << 20,))

    def test_outputs_that_have_no_way_to_go_are_an_error_of_their_step(self):
        self.harness.open()
        os.rename(self.harness.folder, f"{self.harness.folder}-gone")
        reply, outputs = self.harness.step(
            "load_cache", {"key_cache": Tensor("u8", np.ones(33 << 20, np.uint8))}
        )
        self.assertEqual((reply["status"], reply["class"], outputs), ("error", "crash", {}))
        self.assertIn("can't be written", reply["text"])
        self.assertEqual(self.harness.open(session=2)["status"], "ok")

    def test_inputs_that_the_engine_changed_come_back(self):
        self.harness.open()
        inputs = {**BATCH, "seq_lens": i32(5, 6)}
        for via_file in (False, True):
            _, outputs = self.harness.step("layout", inputs, via_file=via_file)
            self.assertEqual(set(outputs), {"input_after.seq_lens", "input_after.block_table"})
            np.testing.assert_array_equal(outputs["input_after.seq_lens"].codes, [99, 6])
            np.testing.assert_array_equal(outputs["input_after.block_table"].codes, [[1, 1]])

    def test_what_an_engine_prints_goes_to_the_log(self):
        self.harness.open()
        reply, _ = self.harness.step("read_cache")
        self.assertEqual(reply["status"], "ok")
        self.harness.send({"type": "bye"})
        self.harness.exit_code()
        for words in ("from print", "from the descriptor", "from C"):
            self.assertIn(words, self.harness.log())

    def test_each_failure_has_its_class_and_ends_its_session_alone(self):
        expected = [
            ("error", "crash", "ZeroDivisionError"),
            ("error", "crash", "exit with 3"),
            ("unsupported", None, "no kernel for three rows"),
            ("error", "device_lost", "the driver says no"),
            ("error", "timeout", "gave rank 1 up"),
            ("error", "device_lost", "illegal memory access"),
            ("error", "crash", "output 'out'"),
            ("error", "crash", "returned int"),
        ]
        self.harness.open(session=100)
        for which, (status, kind, words) in enumerate(expected):
            self.assertEqual(self.harness.open(session=which)["status"], "ok")
            reply, _ = self.harness.step("decode", batch(which), session=which)
            self.assertEqual((reply["status"], reply.get("class")), (status, kind), reply)
            self.assertIn(words, reply.get("text") or reply["reason"])
            self.assertEqual(reply.get("rank"), 1 if kind == "timeout" else None)
            again, _ = self.harness.step("pack_lse", {"lse": i32(1)}, session=which)
            self.assertEqual(again["status"], "ok" if status == "unsupported" else "error", reply)
            closed, _ = self.harness.ask({"type": "close", "session": which})
            self.assertEqual(closed["status"], "ok")
        self.assertEqual(self.harness.step("pack_lse", {"lse": i32(1)}, session=100)[0]["status"], "ok")

    def test_the_text_of_a_crash_ends_with_the_line_that_raised(self):
        self.harness.open()
        reply, _ = self.harness.step("decode", batch(0))
        lines = reply["text"].splitlines()
        self.assertTrue(lines[0].startswith("ZeroDivisionError"))
        self.assertTrue(any("odd_engines.py" in line for line in lines))

    def test_a_tensor_that_a_method_does_not_take_is_unsupported(self):
        self.harness.open()
        reply, _ = self.harness.step("verify", batch(1))
        self.assertEqual(reply["status"], "unsupported")
        self.assertIn("takes no", reply["reason"])
        self.assertIn("seq_lens", reply["reason"])

    def test_a_tensor_that_a_method_asks_for_and_is_not_there_is_an_error(self):
        self.harness.open()
        reply, _ = self.harness.step("decode", BATCH)
        self.assertEqual(reply["status"], "error")
        self.assertIn("asks for query, seq_lens", reply["text"])

    def test_a_rank_that_waits_is_seen_in_the_progress_record(self):
        self.harness.open()
        header = {
            "type": "step",
            "session": 1,
            "operation": {"operation": "attend", "mask": "bidirectional"},
            "kind": "draft",
        }
        self.harness.send({**header, "id": 2}, batch(1))
        self.assertEqual(self.harness.wait_for_record(1, 2), "all_to_all partials")
        self.assertEqual(self.harness.record(0), (1, "all_gather query"))
        self.assertEqual(self.harness.record(2), (0, ""))
        (self.harness.folder / "go").touch()
        reply, outputs = self.harness.receive()
        self.assertEqual(reply["collectives"], [1, 2])
        self.assertEqual(reply["effective"], {"mask": "bidirectional", "graph": "true", "chunks": "3"})
        self.assertIn("out", outputs)
        self.assertIn("`out` as f32, but its contract declares bf16", self.harness.log())

    def test_the_kind_of_an_attention_step_follows_from_mask_and_rows_where_it_is_not_said(self):
        self.harness.open()
        operation = {"operation": "attend", "mask": "causal"}
        for starts, words in (((0, 1, 2), "ZeroDivisionError"), ((0, 1, 3), "takes no")):
            inputs = {**batch(0), "query_start_loc": i32(*starts)}
            self.harness.open()
            reply, _ = self.harness.ask({"type": "step", "session": 1, "operation": operation}, inputs)
            self.assertIn(words, reply.get("text") or reply["reason"])

    def test_a_session_that_was_never_opened_can_be_neither_used_nor_closed(self):
        for header in ({"type": "step", "operation": {"operation": "layout"}}, {"type": "close"}):
            reply, _ = self.harness.ask({**header, "session": 9})
            self.assertEqual((reply["status"], reply["class"]), ("error", "input"))

    def test_several_sessions_are_open_at_a_time(self):
        for session, ranks in ((1, 2), (2, 4)):
            self.harness.open(session=session, tp=ranks)
        self.harness.ask({"type": "close", "session": 1})
        self.assertEqual(self.harness.step("pack_lse", {"lse": i32(1)}, session=2)[0]["status"], "ok")
        self.assertIn("session of 2 ranks closed", self.harness.log())
        self.assertNotIn("session of 4 ranks closed", self.harness.log())


class CommandLine(unittest.TestCase):
    def test_help_needs_no_harness_and_shows_how_to_start(self):
        shown = run_command("--help")
        self.assertEqual(shown.returncode, 0)
        for words in (
            "exec:'python3 -m shardcheck.adapter",
            "torchrun",
            "--OPTION VALUE",
            "SHARDCHECK_FOLDER",
            "89",
        ):
            self.assertIn(words, shown.stdout)

    def test_the_profile_can_be_looked_at_without_a_harness(self):
        shown = run_command("--profile", *ECHO)
        self.assertEqual(json.loads(shown.stdout)["engine"], "echo")

    def test_without_a_harness_it_says_who_starts_it(self):
        shown = run_command(*ECHO)
        self.assertEqual(shown.returncode, 2)
        self.assertIn("SHARDCHECK_ADDRESS", shown.stderr)

    def test_wrong_usage_is_two_and_says_what_is_wrong(self):
        for words, reason in (
            ([], "which engine"),
            (["--what", "a:B"], "unknown option --what"),
            (["a:B", "stray"], "'stray'"),
            (["a:B", "--last"], "--last has no value"),
        ):
            shown = run_command(*words)
            self.assertEqual((shown.returncode, reason in shown.stderr), (2, True), shown.stderr)

    def test_an_engine_that_cannot_be_loaded_is_named_with_the_reason(self):
        for target, code, words in (
            ("odd_engines:Nobody", 1, "engines in it: Echo"),
            ("odd_engines:BATCH", 1, "has no 'BATCH'"),
            ("odd_engines:EchoSession", 1, "derives from shardcheck.Engine"),
            ("odd_engines", 1, "MODULE:CLASS"),
            ("not_there:Engine", 1, "not_there"),
            ("not/there.py:Engine", 1, "there is no file not/there.py"),
            ("odd_engines:Lacking", 1, "declares write_kv, but EchoSession has no such method"),
            ("odd_engines:Broken", 1, "the library is missing"),
            ("odd_engines:Nameless", 1, "Nameless has no `name`"),
            ("odd_engines:Elsewhere", 89, "there is no GPU"),
        ):
            shown = run_command("--profile", target)
            self.assertEqual(shown.returncode, code, shown.stderr)
            self.assertIn(words, shown.stderr)
        shown = run_command("--profile", *ECHO, "--unknown", "1")
        self.assertEqual(shown.returncode, 1)
        self.assertIn("unknown", shown.stderr)

    def test_a_method_that_is_not_declared_is_warned_of(self):
        shown = run_command("--profile", "odd_engines:Modest")
        self.assertEqual(shown.returncode, 0)
        self.assertIn("EchoSession has draft, which Modest doesn't declare", shown.stderr)


class BindingParameters(unittest.TestCase):
    """Parameters that change what is asked."""

    def test_a_method_that_takes_anything_must_still_name_what_changes_the_question(self) -> None:
        from shardcheck.desk import arguments_for

        def swallows(query, **_):
            return query

        def minds(query, overlap=False, **_):
            return query, overlap

        self.assertEqual(arguments_for(swallows, {"query": 1}, {"world": 2}), {"query": 1, "world": 2})
        self.assertEqual(arguments_for(minds, {"query": 1}, {"overlap": True}), {"query": 1, "overlap": True})
        for name in ("overlap", "lse_base", "padded_rows", "shared"):
            with self.assertRaisesRegex(Unsupported, f"takes no {name}"):
                arguments_for(swallows, {"query": 1}, {name: True})


if __name__ == "__main__":
    sys.exit(unittest.main())
