//! Cases as Python scripts, run by python3 with numpy where there is one.

use std::path::Path;
use std::process::Command;

use crate::program::{Program, only_case_folder};

/// Whether `python3` imports numpy; said aloud when not.
fn has_numpy() -> bool {
    let found =
        Command::new("python3").args(["-c", "import numpy"]).output().is_ok_and(|o| o.status.success());
    if !found {
        eprintln!("SKIPPED: there is no python3 that imports numpy, to run emitted scripts with");
    }
    found
}

/// Exit code and standard output of a script.
fn run(script: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new("python3").arg(script).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

/// The script with a body for `engine`.
fn with_engine(program: &Program, script: &str, body: &str) -> std::path::PathBuf {
    let text = std::fs::read_to_string(program.path(script)).unwrap();
    let empty = "    raise NotImplementedError(\"put your call here\")\n";
    assert_eq!(text.matches(empty).count(), 1);
    let filled = format!("filled-{script}");
    program.write(&filled, text.replace(empty, body));
    program.path(&filled)
}

/// A case of each kind that a script has a reference for.
const SELECTIONS: [&str; 11] = [
    "family(merge_states) & pattern(some_empty)",
    "family(merge_states) & pattern(broken_lse)",
    "family(merge_partials) & pattern(some_empty)",
    "family(merge_partials) & pattern(broken_lse)",
    "family(decode) & model(tiny-gqa16) & world(8)",
    "family(verify) & model(tiny-mla) & pbm(true)",
    "family(draft)",
    "family(attend_sinks) & world(1)",
    "family(attend_sinks) & world(>1) & padded(>0)",
    "family(context) & model(tiny-gqa16)",
    "family(layout)",
];

#[test]
fn the_reference_of_a_script_is_allowed_in_every_family_and_a_changed_output_is_not() {
    if !has_numpy() {
        return;
    }
    let program = Program::new();
    for (index, selection) in SELECTIONS.into_iter().enumerate() {
        let id = program.ids(&["--suite", "engine-smoke", "-E", selection])[0].clone();
        let name = format!("case{index}.py");
        program.expect(0, &["replay", &id, "--emit-python", &name]);
        let script = program.path(&name);
        let (code, text) = run(&script, &[]);
        assert!(code == Some(2) && text.contains("put your call here"), "{id}\n{text}");
        assert!(text.contains("expected") && text.contains("allowed"), "{id}\n{text}");
        let (code, text) = run(&script, &["--self"]);
        assert!(code == Some(0) && text.contains("0 of "), "{id}\n{text}");
        let (code, text) = run(&script, &["--seen"]);
        assert_eq!(code, Some(0), "the embedded engine conforms: {id}\n{text}");
        let honest = with_engine(&program, &name, "    return honest()\n");
        assert_eq!(run(&honest, &[]).0, Some(0), "{id}");
        let first = if selection.contains("layout") { "local_lens" } else { "out" };
        let body = format!(
            "    outputs = honest()\n    flat = outputs[\"{first}\"].reshape(-1)\n    at = int(np.flatnonzero(~np.isnan(array(WANTED[\"{first}\"][\"low\"])).reshape(-1))[-1])\n    flat[at] += 1\n    return outputs\n"
        );
        let (code, text) = run(&with_engine(&program, &name, &body), &[]);
        assert!(code == Some(1) && text.contains("1 of "), "{id}\n{text}");
        let missing = with_engine(&program, &name, "    return {}\n");
        let (code, text) = run(&missing, &[]);
        assert!(code == Some(1) && text.contains(&format!("{first} is missing")), "{id}\n{text}");
    }
}

#[test]
fn what_a_recorded_run_saw_is_in_the_script_without_its_engine() {
    let program = Program::new();
    let states = "family(merge_states) & pattern(all_empty) & dtype(bf16)";
    let selection = ["--suite", "engine-smoke", "-E", states];
    let run_it = [&["run", "--fault", "two-empty-states-give-nan", "--no-diagnose"], &selection[..]].concat();
    program.expect(1, &run_it);
    let told = program.expect(0, &["replay", "latest", "--emit-python", "run.py"]).err;
    assert!(!told.contains("answers now"), "{told}");
    let folder = only_case_folder(&program.latest());
    program.expect(0, &["replay", folder.to_str().unwrap(), "--emit-python", "folder.py"]);
    let text = std::fs::read_to_string(program.path("run.py")).unwrap();
    assert_eq!(text, std::fs::read_to_string(program.path("folder.py")).unwrap());
    if !has_numpy() {
        return;
    }
    let (code, text) = run(&program.path("run.py"), &["--seen"]);
    assert!(code == Some(1) && text.contains("seen nan; out at rank 0"), "{text}");
    assert_eq!(run(&program.path("run.py"), &["--self"]).0, Some(0));
    let id = program.ids(&selection)[0].clone();
    let fault = ["replay", &id, "--fault", "two-empty-states-give-nan", "--emit-python", "now.py"];
    let told = program.expect(0, &fault).err;
    assert!(told.contains("holds what cpu answers now: fail"), "{told}");
    assert_eq!(run(&program.path("now.py"), &["--seen"]).0, Some(1));
}

#[test]
fn a_script_asks_what_lse_unit_asks_and_no_other_property() {
    let program = Program::new();
    let selection = ["--suite", "engine-smoke", "-E", "family(decode) & probe(gaussian) & world(>1)"];
    let id = program.ids(&selection)[0].clone();
    let emit = |property| ["replay", &id, "--emit-python", "unit.py", "--property", property];
    let told = program.expect(2, &emit("decode.output")).err;
    assert!(told.contains("--property lse.unit") && !program.path("unit.py").exists(), "{told}");
    let other = program.ids(&["--suite", "engine-smoke", "-E", "family(layout | attend_sinks)"])[0].clone();
    let asked = ["replay", &other, "--emit-python", "unit.py", "--property", "lse.unit"];
    let told = program.expect(2, &asked).err;
    assert!(told.contains("lse.unit asks nothing of"), "{told}");
    let told = program.expect(0, &emit("lse.unit")).err;
    assert!(told.contains("holds what cpu answers now: pass"), "{told}");
    if !has_numpy() {
        return;
    }
    for (name, argument) in [("reference", "--self"), ("seen", "--seen")] {
        let (code, text) = run(&program.path("unit.py"), &[argument]);
        assert!(code == Some(0) && text.contains(&format!("{name}: lse: 0 of ")), "{text}");
        assert!(text.contains("as lse.unit asks it"), "{text}");
    }
    let body = "    outputs = honest()\n    outputs[\"lse\"] = outputs[\"lse\"].astype(np.float16)\n    return outputs\n";
    let (code, text) = run(&with_engine(&program, "unit.py", body), &[]);
    assert!(code == Some(1) && text.contains("engine: out: 0 of "), "an LSE of 16 bits is seen: {text}");
    let raising = with_engine(&program, "unit.py", "    raise ValueError(\"no such type\")\n");
    let (code, text) = run(&raising, &[]);
    assert!(code == Some(1) && text.contains("no such type") && text.contains("gives no answer"), "{text}");
}

#[test]
fn a_case_of_many_bytes_has_its_arrays_beside_the_script() {
    if !has_numpy() {
        return;
    }
    let program = Program::new();
    let id = "decode/tiny-gqa/tp4.dcp4.h4.s4.b16.n40.bf16.a2a.lo_hi/900+1_37+1.shuf/gaussian/7";
    program.expect(0, &["replay", id, "--emit-python", "large.py"]);
    let length = std::fs::metadata(program.path("large.py")).unwrap().len();
    assert!(program.path("large.npz").is_file() && length < 60_000, "{length}");
    let (code, text) = run(&program.path("large.py"), &["--self"]);
    assert_eq!(code, Some(0), "{text}");
    std::fs::remove_file(program.path("large.npz")).unwrap();
    let (code, text) = run(&program.path("large.py"), &["--self"]);
    assert!(code == Some(1) && text.contains("large.npz"), "{text}");
}

#[test]
fn a_family_without_a_reference_is_refused_with_those_that_have_one() {
    let program = Program::new();
    let without = "not family(merge_states | merge_partials | decode | verify | draft | attend_sinks | context | layout | rules)";
    let mut ids = program.ids(&["--suite", "engine-smoke", "-E", without]);
    ids.extend(program.ids(&["--suite", "gate", "-E", "family(stack) & tp(1)"]));
    let mut families = std::collections::BTreeSet::new();
    for id in ids {
        if !families.insert(id.split('/').next().unwrap().to_owned()) {
            continue;
        }
        let error = program.expect(2, &["replay", &id, "--emit-python", "x.py"]).err;
        assert!(error.contains("merge_states, merge_partials, decode"), "{error}");
        assert!(!error.contains("answers now"), "nothing is judged before it is refused: {error}");
        assert!(!program.path("x.py").exists());
        assert!(error.contains("shardcheck export inputs"), "{error}");
        let folder = program.path("inputs");
        let _ = std::fs::remove_dir_all(&folder);
        follow(&program, &error);
        assert!(folder.join("export.json").is_file(), "{id}");
    }
    assert!(families.len() >= 10 && families.contains("stack"), "{families:?}");
    let id = program.ids(&["--suite", "gate", "-E", "family(rules)"])[0].clone();
    let error = program.expect(2, &["replay", &id, "--emit-python", "x.py"]).err;
    assert!(error.contains("neither a script nor files"), "{error}");
    follow(&program, &error);
}

/// Runs the command that an error ends in, as it stands there.
fn follow(program: &Program, error: &str) {
    let (_, command) =
        error.trim_end().rsplit_once("shardcheck ").unwrap_or_else(|| panic!("no command: {error}"));
    let words: Vec<&str> = command.split(' ').map(|word| word.trim_matches('\'')).collect();
    program.expect(0, &words);
}
