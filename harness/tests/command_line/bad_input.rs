//! Input that is wrong: each slip has its own message, says what to do, and has the documented exit code.

use serde_json::{Value, json};
use shardcheck_cases::Case;

use crate::program::Program;

const ID: &str =
    "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n12.e4m3fn@0.5.a2a.hi_lo.qrep/12+3_0+0_7+2.pad2.shuf/cold/7";

/// The command ends with `code`, prints nothing to standard output, and its message has all `parts`.
#[track_caller]
fn refuses(program: &Program, code: i32, arguments: &[&str], parts: &[&str]) {
    let outcome = program.expect(code, arguments);
    assert!(outcome.err.starts_with("error: "), "{}\n{}", outcome.line, outcome.err);
    for part in parts {
        assert!(outcome.err.contains(part), "{}: {part:?} is not in\n{}", outcome.line, outcome.err);
    }
    assert_eq!(outcome.out, "", "{}", outcome.line);
}

/// The case of [`ID`] as JSON with one change.
fn changed(change: impl Fn(&mut Value)) -> String {
    let mut value: Value = serde_json::from_str(&ID.parse::<Case>().unwrap().to_json()).unwrap();
    change(&mut value);
    value.to_string()
}

fn configuration(value: &mut Value) -> &mut Value {
    &mut value["body"]["attention"]["configuration"]
}

#[test]
fn a_case_file_that_is_none_is_refused_by_name_and_reason() {
    let program = Program::new();
    program.write("malformed.json", "{\"schema_version\": 1,");
    program.write("number.json", "7");
    program.write("version.json", changed(|case| case["schema_version"] = json!(99)));
    program.write("family.json", changed(|case| case["family"] = json!("verfy")));
    program.write("probe.json", changed(|case| case["body"]["attention"]["probe"] = json!("cld")));
    program.write("model.json", changed(|case| case["body"]["attention"]["model"] = json!("tiny")));
    program.write("field.json", changed(|case| configuration(case)["interleav"] = json!(2)));
    program.write("too-wide.json", changed(|case| configuration(case)["interleave"] = json!(16)));
    program.write("uneven.json", changed(|case| configuration(case)["interleave"] = json!(3)));
    program.write("few-blocks.json", changed(|case| configuration(case)["blocks"] = json!(1)));
    for (file, parts) in [
        ("malformed.json", vec!["malformed case", "line 1", "shardcheck explain case-json"]),
        ("number.json", vec!["malformed case", "schema_version"]),
        ("version.json", vec!["schema version 99", "this program reads 1"]),
        ("family.json", vec!["unknown value", "`verfy`", "`verify`"]),
        ("probe.json", vec!["unknown value", "`cld`", "`cold`"]),
        ("model.json", vec!["unknown value", "\"tiny\"", "tiny-mla"]),
        ("field.json", vec!["malformed case", "unknown key `interleav`"]),
        ("too-wide.json", vec!["S = 16", "larger than the block size B = 8", "choose S ≤ B"]),
        ("uneven.json", vec!["B = 8", "not a multiple of interleave S = 3"]),
        ("few-blocks.json", vec!["1 blocks", "the null block 0", "give at least"]),
        ("missing.json", vec!["failed to read the case"]),
    ] {
        let parts: Vec<&str> = parts.into_iter().chain([file]).collect();
        refuses(&program, 2, &["run", "--case", file], &parts);
        if file != "missing.json" {
            refuses(&program, 2, &["replay", file], &parts);
        }
    }
    assert!(!program.path("runs").exists(), "no run was started");
}

#[test]
fn a_case_id_that_is_none_says_which_part() {
    let program = Program::new();
    for (id, part) in [
        ("nonsense", "unknown family \"nonsense\""),
        ("verify/tiny-mla/tp4", "an attention id has 6"),
        (&ID.replace("cold", "cld"), "cold"),
        (&ID.replace("s2.b8", "s16.b8"), "choose S ≤ B"),
        (&ID.replace("s2.b8", "s3.b8"), "not a multiple of interleave S = 3"),
        (&ID.replace("dcp2", "dcp3"), "dcp"),
    ] {
        refuses(&program, 2, &["replay", id], &[part]);
    }
}

#[test]
fn what_begins_as_an_id_is_not_taken_for_a_file_and_what_is_empty_for_nothing_else() {
    let program = Program::new();
    let wide = ID.replace("s2.b8", "s16.b8");
    for arguments in [&["replay", &wide][..], &["shrink", &wide], &["run", "--case", &wide]] {
        let error = program.expect(2, arguments).err;
        assert!(error.contains("choose S ≤ B") && !error.contains("file"), "{error}");
    }
    program.expect(0, &["run", "--suite", "engine-smoke", "layout/"]);
    for arguments in [&["replay", ""][..], &["shrink", ""], &["diagnose", ""], &["judge", ""]] {
        let error = program.expect(2, arguments).err;
        assert!(error.contains("empty"), "{arguments:?}: {error}");
    }
}

#[test]
fn a_number_of_experts_or_tokens_that_is_out_of_range_is_told_with_the_range() {
    let program = Program::new();
    let tail = "tiny-mla/tp2.dcp2.h1.s1.b4.n9.bf16.ag_rs/prompt/v0+6/7";
    for (stack, part) in [
        ("l3.h20.i9.v13.whole.e6.k7.d1", "k (experts of a row) is 7; it must be between 1 and 6"),
        ("l3.h20.i9.v13.whole.e0.k1.d1", "e (experts) is 0; it must be between 1 and 4096"),
        ("l3.h20.i9.v13.whole.e6.k2.d3", "is 3; it must be between 0 and 2"),
        ("l3.h20.i9.v13.whole.e6.k2.d1.y3", "y (layers routed by token id) is 3; it must be between 0 and 2"),
        (
            "l2.h20.i9.v13.whole.sm.x16385.packed",
            "x (tokens of a row) is 16385; it must be between 1 and 16384",
        ),
        ("l2.h64.i20.v7.whole.wired.m0.r0", "leave m and r out"),
    ] {
        refuses(&program, 2, &["replay", &format!("stack/{stack}/{tail}")], &[part]);
    }
    let long =
        "stack/l2.h40.i8.v8.whole.wired/tiny-mla/mla24+8v12.tp2.dcp2.h2.s1.b8.bf16.a2a.hi_lo/long/v0+1025/7";
    refuses(&program, 2, &["replay", long], &["1025 rows in all steps", "there may be 1024"]);
    let route = "route/softmax.biased.e8.k9.g2.kept1.negative_infinity.sum.x1/t4.random/7";
    let error = program.expect(2, &["replay", route]).err;
    assert!(error.contains("there may be 1 to 4 experts"), "{error}");
}

#[test]
fn a_case_file_with_a_key_twice_or_a_list_for_an_object_is_refused_with_the_place() {
    let program = Program::new();
    let text = ID.parse::<Case>().unwrap().to_json();
    let twice = text.replacen("\"seed\"", "\"seed\": 1, \"seed\"", 1);
    program.write("twice.json", &twice);
    program.write(
        "listed.json",
        changed(|case| {
            let requests = &mut case["body"]["attention"]["workload"]["requests"];
            requests[0] = json!([12, 3]);
        }),
    );
    refuses(&program, 2, &["replay", "twice.json"], &["the key `seed` stands twice"]);
    let place = "`body.attention.workload.requests[0]` is a list, and an object stands there";
    refuses(&program, 2, &["replay", "listed.json"], &[place]);
}

#[test]
fn a_filter_expression_that_is_wrong_is_shown_with_its_place() {
    let program = Program::new();
    for (expression, parts) in [
        ("probe(cld)", ["unknown probe \"cld\"", "did you mean \"cold\"?", "^^^"]),
        ("famly(verify)", ["unknown axis \"famly\"", "did you mean \"family\"?", "^^^^^"]),
        ("world(four)", ["takes whole numbers", "world(>=4)", "^^^^"]),
        ("family(verify", ["not closed", "family(verify", "^"]),
        ("prop(verify.outptu)", ["verify.outptu", "did you mean \"verify.output\"?", ""]),
    ] {
        for verb in ["list", "run"] {
            refuses(&program, 2, &[verb, "-E", expression], &parts);
        }
    }
}

#[test]
fn an_unknown_name_gets_the_known_ones() {
    let program = Program::new();
    for (arguments, parts) in [
        (
            &["run", "--fault", "committed-prefix-row"][..],
            ["did you mean \"committed-prefix-rows\"", "mutants list"],
        ),
        (&["replay", ID, "--fault", "nonsense"], ["unknown fault \"nonsense\"", "mutants list"]),
        (&["mutants", "run", "--fault", "committed-prefix-row"], ["committed-prefix-rows", "mutants list"]),
        (&["run", "--engine", "gpu"], ["unknown engine \"gpu\"", "cpu"]),
        (&["doctor", "--engine", "gpu"], ["unknown engine \"gpu\"", "cpu"]),
        (
            &["run", "--suite", "gat"],
            ["unknown suite \"gat\"", "gate, nightly, engine-smoke, engine-device, seeds, mustpass"],
        ),
        (
            &["replay", ID, "--property", "verify.outptu"],
            ["verify.outptu", "did you mean \"verify.output\"?"],
        ),
        (&["explain", "verify.outptu"], ["verify.outptu", "did you mean \"verify.output\"?"]),
        (&["list", "--exact", "verify/x"], ["no case has the id \"verify/x\"", "shardcheck list"]),
        (&["judge", "nowhere"], ["nowhere is not a run folder", "latest"]),
        (&["diff", "latest"], ["latest is not a run folder", "holds no run yet"]),
        (&["run", "--resume"], ["latest is not a run folder", "holds no run yet"]),
        (&["run", "--frobnicate"], ["--frobnicate", "--help"]),
    ] {
        refuses(&program, 2, arguments, &parts);
    }
}

#[test]
fn a_number_that_makes_no_sense_is_refused() {
    let program = Program::new();
    for (arguments, parts) in [
        (&["run", "--partition", "hash:0/8"][..], ["parts are counted from one", "hash:1/8"]),
        (&["list", "--partition", "hash:9/8"], ["part 9 of 8", "from 1 to 8"]),
        (&["list", "--partition", "1/8"], ["\"1/8\" is not of the form", "hash:1/8"]),
        (&["run", "--jobs", "0"], ["--jobs", "at least 1"]),
        (&["run", "--jobs", "many"], ["--jobs", "many"]),
        (&["run", "--seed", "-1"], ["-1", "--help"]),
        (&["run", "--timeout-s", "nan"], ["--timeout-s", "above zero"]),
        (&["run", "--timeout-s", "0"], ["--timeout-s", "above zero"]),
        (&["run", "--timeout-s=-3"], ["--timeout-s", "above zero"]),
        (&["run", "--timeout-s", "1e300"], ["--timeout-s", "number of seconds"]),
        (&["replay", ID, "--timeout-s", "nan"], ["--timeout-s", "above zero"]),
    ] {
        refuses(&program, 2, arguments, &parts);
    }
}

#[test]
fn a_selection_without_any_case_is_no_success() {
    let program = Program::new();
    for arguments in [
        &["run", "no-such-part-of-an-id"][..],
        &["list", "-E", "world(>=4000)"],
        &["run", "-E", "family(write) & prop(verify.output)"],
        &["mutants", "run", "-E", "family(decode) & family(verify)"],
    ] {
        refuses(&program, 4, arguments, &["none of the", "is selected", "shardcheck list"]);
    }
    assert!(!program.path("runs").exists());
}

#[test]
fn a_list_of_cases_without_any_is_no_success_either() {
    let program = Program::new();
    program.write("none.txt", "# nothing\n\n");
    program.write("typo.txt", "verify/x\n");
    refuses(&program, 2, &["run", "--caselist", "none.txt"], &["none.txt names no case"]);
    refuses(&program, 2, &["run", "--caselist", "typo.txt"], &["no case has the id \"verify/x\""]);
    refuses(&program, 2, &["run", "--caselist", "gone.txt"], &["failed to read the case list gone.txt"]);
}

#[test]
fn a_run_folder_below_a_file_cannot_be_made_and_says_so() {
    let program = Program::new();
    program.write("file", "");
    for runs in ["file", "file/below"] {
        let parts = ["failed to write", runs, "choose a folder that can be written with `--runs DIR`"];
        refuses(&program, 2, &["run", "--suite", "engine-smoke", "--runs", runs], &parts);
    }
    assert_eq!(std::fs::read(program.path("file")).unwrap(), b"");
}

#[test]
fn a_report_that_cannot_be_written_is_told_before_the_run() {
    let program = Program::new();
    program.write("file", "");
    let arguments = ["run", "--suite", "engine-smoke", "layout/", "--junit", "file/junit.xml"];
    let outcome = program.expect(2, &arguments);
    assert!(outcome.err.contains("--junit file/junit.xml: no file can be written there"), "{}", outcome.err);
    assert!(!program.path("runs").exists(), "nothing was judged");
}

#[cfg(unix)]
#[test]
fn a_report_behind_a_link_into_a_folder_that_is_not_there_is_told_before_the_run_too() {
    let program = Program::new();
    for (target, link) in
        [("no/folder.xml", "away.xml"), ("away.xml", "further.xml"), ("circle.xml", "circle.xml")]
    {
        std::os::unix::fs::symlink(target, program.path(link)).unwrap();
        let arguments = ["run", "--suite", "engine-smoke", "layout/", "--junit", link];
        let outcome = program.expect(2, &arguments);
        assert!(outcome.err.contains("no file can be written there"), "{link}: {}", outcome.err);
    }
    assert!(!program.path("runs").exists(), "nothing was judged");
}

#[test]
fn a_golden_folder_with_one_flipped_byte_fails_and_names_the_file() {
    let program = Program::new();
    program.expect(0, &["golden", "generate", "vectors"]);
    let outcome = program.expect(0, &["golden", "verify", "vectors"]);
    assert!(outcome.out.starts_with("pass vectors"), "{}", outcome.out);
    let path = program.path("vectors/merge.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    std::fs::write(&path, bytes).unwrap();
    let outcome = program.expect(1, &["golden", "verify", "vectors"]);
    assert!(outcome.out.starts_with("fail vectors/merge.safetensors"), "{}", outcome.out);
    assert!(outcome.out.contains(&format!("byte {last}")), "{}", outcome.out);
    assert!(outcome.out.contains("golden generate vectors"), "{}", outcome.out);
    assert!(!outcome.out.contains("attention.safetensors"), "{}", outcome.out);
}

#[test]
fn a_golden_folder_without_a_manifest_that_reads_is_a_usage_error() {
    let program = Program::new();
    std::fs::create_dir(program.path("vectors")).unwrap();
    refuses(&program, 2, &["golden", "verify", "vectors"], &["vectors/manifest.json"]);
    program.write("vectors/manifest.json", "{");
    refuses(&program, 2, &["golden", "verify", "vectors"], &["not a golden manifest", "golden generate"]);
    program.write("vectors/manifest.json", r#"{"schema_version": 9, "files": {}, "attention": []}"#);
    refuses(&program, 2, &["golden", "verify", "vectors"], &["schema version 9", "reads 1"]);
    refuses(&program, 2, &["golden", "verify", "nowhere"], &["nowhere/manifest.json"]);
}

#[test]
fn without_a_verb_the_verbs_are_told() {
    let outcome = Program::new().expect(2, &[]);
    for verb in ["run", "list", "explain", "replay", "judge", "mutants", "diff", "golden", "doctor"] {
        assert!(outcome.err.contains(&format!("\n  {verb} ")), "{verb}\n{}", outcome.err);
    }
}

#[cfg(unix)]
#[test]
fn a_report_goes_through_a_link_and_into_a_device_and_replaces_neither() {
    let program = Program::new();
    std::fs::write(program.path("real.xml"), "old").unwrap();
    std::os::unix::fs::symlink("real.xml", program.path("link.xml")).unwrap();
    std::os::unix::fs::symlink("/dev/null", program.path("nowhere.html")).unwrap();
    let arguments =
        ["run", "--suite", "engine-smoke", "layout/", "--junit", "link.xml", "--html", "nowhere.html"];
    program.expect(0, &arguments);
    assert!(program.path("link.xml").is_symlink() && program.path("nowhere.html").is_symlink());
    assert!(std::fs::read_to_string(program.path("real.xml")).unwrap().contains("<testsuites"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_list_that_could_not_be_written_whole_does_not_look_whole() {
    let program = Program::new();
    for arguments in [&["list"][..], &["mutants", "list"], &["explain", "faults"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let outcome = program.command(arguments).stdout(full).output().unwrap();
        assert_eq!(outcome.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&outcome.stderr).contains("is not whole"), "{arguments:?}");
    }
}

#[test]
fn a_replay_that_judges_nothing_is_no_pass() {
    let program = Program::new();
    let pack = program.ids(&["--suite", "gate", "pack_lse/"]).remove(0);
    program.expect(0, &["replay", &pack]);
    program.expect(3, &["replay", &pack, "--property", "verify.output"]);
}
