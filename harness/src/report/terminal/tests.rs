//! What a person sees.

use super::*;
use crate::sample;

fn rendered(options: TerminalOptions, events: &[Event]) -> String {
    let glossary = Glossary::new([("attention.bound", "the output is attention over the visible keys")]);
    let mut out = Vec::new();
    let mut reporter = TerminalReporter::new(&mut out, options, glossary);
    events.iter().for_each(|event| reporter.event(event).unwrap());
    drop(reporter);
    String::from_utf8(out).unwrap()
}

fn at_level(status_level: StatusLevel) -> String {
    rendered(TerminalOptions { status_level, ..Default::default() }, &sample::events(&sample::header()))
}

#[test]
fn a_run_ends_with_the_line_against_vacuity() {
    let text = at_level(StatusLevel::Fail);
    assert!(text.lines().last().unwrap().starts_with("cases: tried 6, judged 4,"), "{text}");
}

#[test]
fn the_summary_tells_verdicts_ratios_reasons_and_folder() {
    let run_folder = Some(PathBuf::from("runs/20260810T123456Z-1a2b3c4d"));
    let text =
        rendered(TerminalOptions { run_folder, ..Default::default() }, &sample::events(&sample::header()));
    for expected in [
        "7 cases of suite gate on engine cpu, seed 7",
        "exit code 1: something failed",
        "1 pass, 1 unsupported, 1 skipped, 1 inconclusive, 2 fail, 1 crash",
        "decode               0.750  decode/deepseek-r1/tp8.dcp8.h16.s64.b64.n12.bf16.a2a.lo_hi/4095+1.shuf/gaussian/7",
        "verify                25.0  verify/tiny-mla/tp8.dcp4.h2.s4.b16.n8.e4m3fn.a2a.hi_lo.qrep/100+4_0+0_29+3.pad1.shuf/cold/7",
        "unsupported  1 × no draft route",
        "inconclusive  1 × both took the same path",
        "9392 compared, 10 of them for equality",
        "12.5 s",
        "run folder  runs/20260810T123456Z-1a2b3c4d",
        "fault       survived swap-lanes (3 cases tried)",
        "failed      verify/tiny-mla/tp8.dcp4.h2.s4.b16.n8.e4m3fn.a2a.hi_lo.qrep/100+4_0+0_29+3.pad1.shuf/cold/7",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
}

#[test]
fn at_the_default_level_only_failures_get_lines() {
    let text = at_level(StatusLevel::Fail);
    let (live, _) = text.split_once("exit code").unwrap();
    assert!(live.contains("fail verify/tiny-mla/tp8.dcp4.h2.s4.b16.n8.e4m3fn.a2a.hi_lo.qrep/100+4_0+0_29+3.pad1.shuf/cold/7\n"), "{live}");
    assert!(
        live.contains("crash write/tiny-mla/tp2.dcp2.h2.s4.b8.n6.bf16.ag_rs/0+12.seq/gaussian/7\n"),
        "{live}"
    );
    assert!(live.contains("reproduce  shardcheck replay 'verify/tiny-mla/tp8.dcp4.h2.s4.b16.n8.e4m3fn.a2a.hi_lo.qrep/100+4_0+0_29+3.pad1.shuf/cold/7'\n"), "{live}");
    for quiet in ["pass ", "skipped ", "unsupported ", "inconclusive ", "killed "] {
        assert!(!live.contains(quiet), "{quiet:?} should not be in\n{live}");
    }
}

#[test]
fn each_level_adds_its_verdicts() {
    let live = |level| at_level(level).split_once("exit code").unwrap().0.to_owned();
    assert!(live(StatusLevel::Warn).contains(
        "inconclusive merge_states/w2.t4.h2.d16.bf16.ag_rs/random/contiguous/7: both took the same path\n"
    ));
    assert!(!live(StatusLevel::Warn).contains("skipped context"));
    assert!(live(StatusLevel::Skip).contains("skipped context/tiny-mla/tp2.dcp2.h2.s4.b8.n6.bf16.ag_rs.lat/12+4.seq.c16/gaussian/7: belongs to another partition\n"));
    assert!(!live(StatusLevel::Skip).contains("pass decode"));
    assert!(live(StatusLevel::Pass).contains(
        "pass decode/deepseek-r1/tp8.dcp8.h16.s64.b64.n12.bf16.a2a.lo_hi/4095+1.shuf/gaussian/7\n"
    ));
    assert!(!live(StatusLevel::Pass).contains("0.750 of the bound"));
    assert!(live(StatusLevel::All).contains("pass  attention.bound, 0.750 of the bound\n"));
}

#[test]
fn a_flood_of_one_cause_gets_three_blocks_and_then_a_line_each() {
    let mut events = vec![Event::RunStarted(Box::new(sample::header()))];
    for index in 0..8 {
        events.push(Event::CaseJudged(sample::failed(&format!("verify/{index}"), sample::failure())));
    }
    let other = crate::finding::Failure { stage: Some(crate::finding::Stage::Layout), ..sample::failure() };
    events.push(Event::CaseJudged(sample::failed("verify/other", other)));
    let text = rendered(TerminalOptions::default(), &events);
    assert_eq!(text.matches("reproduce").count(), 4, "{text}");
    assert_eq!(text.matches("(as above: attention.bound, merge)").count(), 5);
    for index in 0..8 {
        assert!(text.contains(&format!("fail verify/{index}")), "{index}");
    }
}

#[test]
fn many_failures_are_listed_to_a_point_and_counted_beyond() {
    let mut events = vec![Event::RunStarted(Box::new(sample::header()))];
    for index in 0..25 {
        events.push(Event::CaseJudged(sample::failed(&format!("verify/{index}"), sample::failure())));
    }
    events.push(Event::RunFinished { counts: Default::default(), elapsed_s: 1.0, exit_code: 1 });
    let text = rendered(TerminalOptions::default(), &events);
    assert!(text.contains("  failed      and 15 more\n"), "{text}");
}

#[test]
fn colour_is_written_only_when_asked_for() {
    assert!(!at_level(StatusLevel::All).contains('\u{1b}'));
    let style = Style { colour: true, progress: Progress::Off };
    let text = rendered(TerminalOptions { style, ..Default::default() }, &sample::events(&sample::header()));
    assert!(text.contains("\u{1b}[31;1mfail\u{1b}[0m"), "{text}");
}

#[test]
fn a_resumed_run_says_how_much_was_judged_before() {
    let text = rendered(
        TerminalOptions { judged_before: 40, ..Default::default() },
        &sample::events(&sample::header()),
    );
    assert!(text.contains("(40 more were judged before)"), "{text}");
}

#[test]
fn a_progress_bar_leaves_no_trace_in_the_report_itself() {
    let style = Style { colour: false, progress: Progress::Bar };
    let with_bar =
        rendered(TerminalOptions { style, ..Default::default() }, &sample::events(&sample::header()));
    let without = at_level(StatusLevel::Fail);
    assert_eq!(with_bar, without);
}
