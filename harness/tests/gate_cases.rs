//! The gate's cases as tests, one by one: the name of a test is the id of its case, so that any test runner can pick them.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use shardcheck::properties;
use shardcheck::report::Glossary;
use shardcheck::report::block::Block;
use shardcheck::run::judge_case;
use shardcheck::status::Status;
use shardcheck_cases::{Case, SuiteName, suite};

/// Seed that the gate has when none is given.
const SEED: u64 = 1;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = cases(&arguments).into_iter().map(|case| Trial::test(case.id(), move || judge(&case)));
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The gate's cases; where a whole name is given, the case that it spells.
fn cases(arguments: &Arguments) -> Vec<Case> {
    match &arguments.filter {
        // a runner that starts a process for each test must not make the whole suite in each
        Some(id) if arguments.exact => {
            id.parse::<Case>().ok().filter(|case| case.id() == *id).into_iter().collect()
        }
        _ => suite(SuiteName::Gate, SEED),
    }
}

fn judge(case: &Case) -> Result<(), Failed> {
    let result = judge_case(case, &shardcheck_cpu::engine(), &|_| true);
    match result.status {
        Status::Pass | Status::Warn => Ok(()),
        status if status.is_failure() => {
            let glossary = Glossary::new(properties::all().map(|property| (property.id, property.statement)));
            Err(format!("\n{}", Block::of(&result, None, &glossary)).into())
        }
        // a case about which nothing was decided is no test
        status => {
            let checks = result.checks.iter();
            let found: Vec<_> =
                checks.map(|check| format!("  {}: {:?}", check.property, check.finding)).collect();
            Err(format!("{status}: nothing was decided\n{}", found.join("\n")).into())
        }
    }
}
