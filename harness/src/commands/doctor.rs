//! `doctor`: what this machine and an engine can do.

use std::collections::BTreeMap;

use shardcheck_cases::{Case, SuiteName, suite};

use crate::cli::CommandError;
use crate::commands::print;
use crate::commands::run::machine;
use crate::engines::{self, EngineArgs};
use crate::finding::Finding;
use crate::measure::{Reading, measure};
use crate::run::judge_case;
use crate::status::Exit;

/// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs `doctor`.
///
/// # Errors
/// [`CommandError`].
pub fn run(args: &Args) -> Result<Exit, CommandError> {
    let engine = engines::open(&args.engine, None, 30.0)?;
    let profile = engine.profile();
    print(format!("shardcheck {} on {}\n", env!("CARGO_PKG_VERSION"), machine()))?;
    print(format!("engine {} {}\n", profile.engine, profile.version))?;
    let rule_sets: Vec<_> = profile.rule_sets.iter().map(|rules| rules.name()).collect();
    print(format!("rule sets: {}\n", rule_sets.join(", ")))?;
    print("\noperation        contract\n")?;
    for (kind, operation) in &profile.operations {
        let contract = operation.contract.as_ref().map_or_else(
            || "none: it moves or counts and never rounds".to_owned(),
            |contract| serde_json::to_string(contract).unwrap_or_default(),
        );
        print(format!("{:<16} {contract}\n", kind.name()))?;
    }
    for (what, entries) in [
        ("devices", &profile.devices),
        ("the adapter's own steps", &profile.own_steps),
        ("replaced surroundings", &profile.replaced),
    ] {
        if !entries.is_empty() {
            print(format!("{what}:\n  {}\n", entries.join("\n  ")))?;
        }
    }
    for (file, hash) in &profile.files {
        print(format!("file {file} sha256 {hash}\n"))?;
    }
    print("\nfamily           tried  passed  other                           ms a case\n")?;
    let mut failed = false;
    for (family, cases) in by_family() {
        let (mut passed, mut others, mut elapsed_s) = (0, BTreeMap::new(), 0.0);
        for case in &cases {
            let result = judge_case(case, &*engine, &|_| true);
            elapsed_s += result.elapsed_s;
            failed |= result.status.is_failure();
            if result.checks.iter().any(|check| matches!(check.finding, Finding::Holds(_)))
                && !result.status.is_failure()
            {
                passed += 1;
            } else {
                *others.entry(result.status.name()).or_insert(0) += 1;
            }
        }
        let others: Vec<_> = others.into_iter().map(|(status, count)| format!("{count} {status}")).collect();
        let per_case = 1e3 * elapsed_s / cases.len().max(1) as f64;
        let (count, others) = (cases.len(), others.join(", "));
        print(format!("{family:<16} {count:>5}  {passed:>6}  {others:<30} {per_case:>10.2}\n"))?;
    }
    print("\ncontract, tried on crafted steps\n")?;
    for reading in measure(&*engine) {
        failed |= reading.agrees == Some(false);
        let Reading { what, declared, seen, agrees } = reading;
        print(format!("{what:<32} {:<8} declared {declared}; seen {seen}\n", verdict(agrees)))?;
    }
    if args.engine.is_cuda() {
        print("\narithmetic of the card\n")?;
        for reading in engines::card_readings(&args.engine)? {
            let shardcheck_cuda::CardReading { what, declared, seen, agrees } = reading;
            failed |= agrees == Some(false);
            print(format!("{what:<32} {:<8} declared {declared}; seen {seen}\n", verdict(agrees)))?;
        }
    }
    Ok(if failed { Exit::Failed } else { Exit::Passed })
}

fn verdict(agrees: Option<bool>) -> &'static str {
    match agrees {
        Some(true) => "agrees",
        Some(false) => "DIFFERS",
        None => "–",
    }
}

/// A few cases of each family of the smallest suite.
fn by_family() -> BTreeMap<&'static str, Vec<Case>> {
    let mut families: BTreeMap<&'static str, Vec<Case>> = BTreeMap::new();
    for case in suite(SuiteName::EngineSmoke, 1) {
        families.entry(case.family.name()).or_default().push(case);
    }
    families
}
