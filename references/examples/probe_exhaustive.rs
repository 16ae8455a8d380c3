//! How many lost and doubled tokens, pages, ranks and pairs the exact probes miss, in closed form: `cargo run --release -p
//! shardcheck-references --example probe_exhaustive [tokens|draws]`.

#[path = "../tests/probing/mod.rs"]
mod probing;

use probing::{Setting, Tried};
use shardcheck_formats::contract::Merge;
use shardcheck_formats::dtype::Dtype;
use shardcheck_references::probe::KeySelect;
use std::time::Instant;

/// Draws of each kind of fault.
const DRAWS: usize = 1200;

fn main() {
    let part = std::env::args().nth(1);
    let runs = |name: &str| part.as_deref().is_none_or(|part| part == name);
    println!(
        "{:<44} {:>9} {:>7} {:>9} {:>9} {:>7}",
        "setting and fault", "tried", "missed", "named", "tolerance", "seconds"
    );
    let mut missed = 0;
    if runs("tokens") {
        missed += every_token();
    }
    if runs("draws") {
        missed += draws();
    }
    println!("missed in all: {missed}");
    assert_eq!(missed, 0, "a fault went unnoticed");
}

fn report(what: &str, tolerance: f64, trial: impl FnOnce() -> Tried) -> usize {
    let started = Instant::now();
    let tried = trial();
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{what:<44} {:>9} {:>7} {:>9} {tolerance:>9.3} {seconds:>7.1}",
        tried.tried, tried.missed, tried.named
    );
    tried.missed
}

/// Every token dropped and every token doubled, read back from the output alone.
fn every_token() -> usize {
    let mut missed = 0;
    let million = [1_048_576, 1_000_003].map(|tokens| [(8, 1, tokens), (8, 16, tokens)]);
    let others = [(3, 1, 100_003), (6, 1, 100_003), (3, 16, 131_072), (6, 16, 131_072)];
    for (world, interleave, tokens) in million.into_iter().flatten().chain(others) {
        for merge in [Merge::A2a, Merge::AgRsBf16] {
            let setting = Setting::new((world, interleave, 16), tokens, merge, &[]);
            assert!(setting.code.dims() <= 64, "{} dimensions do not fit a head", setting.code.dims());
            assert!(setting.clean_is_silent(), "a healthy row is not silent");
            for (times, what) in [(-1, "dropped"), (1, "doubled")] {
                let what = format!("n={tokens} W={world} S={interleave} {merge} {what}");
                missed += report(&what, setting.tolerance(), || setting.every_token(times));
            }
        }
    }
    missed
}

/// Pages, ranks, rows and pairs, drawn.
fn draws() -> usize {
    let mut missed = 0;
    for (world, interleave, block) in [(8, 1, 16), (8, 16, 64), (3, 1, 128), (6, 1, 16)] {
        for (tokens, merge) in [
            (40_003, Merge::A2a),
            (40_003, Merge::AgRsBf16),
            (1_000_003, Merge::A2a),
            (1_000_003, Merge::AgRsBf16),
        ] {
            let setting = Setting::new((world, interleave, block), tokens, merge, &[]);
            assert!(setting.clean_is_silent(), "a healthy row is not silent");
            assert!(setting.pages_hide_in(1), "a page shows in the signs of its tokens");
            let tolerance = setting.tolerance();
            let of = |what: &str| format!("n={tokens} W={world} S={interleave} B={block} {merge} {what}");
            missed += report(&of("page lost"), tolerance, || setting.pages_lost(DRAWS));
            missed += report(&of("page aliased"), tolerance, || setting.pages_aliased(DRAWS));
            missed += report(&of("row copied"), tolerance, || setting.rows_overwritten(DRAWS, false));
            missed += report(&of("row beside copied"), tolerance, || setting.rows_overwritten(DRAWS, true));
            missed += report(&of("rank missing"), tolerance, || setting.ranks_missing(DRAWS));
            let select = KeySelect::new(setting.code.token_bits(), 32, Dtype::Bf16, 1.0, 0.1)
                .expect("a gap of 400 is wide enough");
            missed += report(&of("keys swapped"), tolerance, || setting.mispaired(&select, DRAWS));
        }
    }
    missed
}
