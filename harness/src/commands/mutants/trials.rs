//! Trials of diagnosis and shrinking on the known faults: what is promised of both is measured here.

use std::time::Duration;

use rayon::prelude::*;
use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, Fault, FaultClass};

use super::chosen;
use crate::cli::CommandError;
use crate::commands::diagnose::budget;
use crate::commands::{CaseArgs, print_lines};
use crate::diagnose::{Disguise, Trial, blind};
use crate::mutants::try_one;
use crate::progress::Progress;
use crate::shrink::{Keep, Size, known_case, shrink as shrink_case};
use crate::status::Exit;

/// Options of `mutants diagnose`.
#[derive(Debug, clap::Args)]
pub struct DiagnoseArgs {
    #[command(flatten)]
    cases: CaseArgs,

    /// Try these faults only
    #[arg(long = "fault", value_name = "NAME")]
    faults: Vec<String>,

    /// How the engine appears to the diagnosis
    #[arg(long, value_enum, default_value = "none", value_name = "HOW")]
    disguise: Disguise,
}

/// Options of `mutants shrink`.
#[derive(Debug, clap::Args)]
pub struct ShrinkArgs {
    #[command(flatten)]
    cases: CaseArgs,

    /// Try these faults only
    #[arg(long = "fault", value_name = "NAME")]
    faults: Vec<String>,

    /// Seconds for each fault
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS")]
    budget_s: f64,
}

pub(super) fn diagnose(args: &DiagnoseArgs) -> Result<Exit, CommandError> {
    let (cases, _) = args.cases.selected()?;
    let faults = chosen(&args.faults)?;
    let progress = Progress::new(faults.len(), "faults");
    let trial = |fault: &&'static Fault| {
        let trial = blind(fault, &cases, args.disguise);
        progress.step();
        trial
    };
    let mut trials: Vec<Trial> = faults.par_iter().with_max_len(1).map(trial).collect();
    drop(progress);
    trials.sort_by_key(|trial| std::cmp::Reverse(trial.place.unwrap_or(usize::MAX)));
    print_lines(trials.iter().map(trial_line))?;
    let within =
        |most: usize| trials.iter().filter(|trial| trial.place.is_some_and(|place| place <= most)).count();
    let silent = trials.iter().filter(|trial| trial.diagnosis.is_none()).count();
    eprintln!(
        "of {} faults {} are named first, {} among the first three; {silent} failed no case",
        trials.len(),
        within(1),
        within(3)
    );
    let enough = within(1) * 100 >= trials.len() * 90 && within(3) * 100 >= trials.len() * 97;
    Ok(if enough { Exit::Passed } else { Exit::Failed })
}

fn trial_line(trial: &Trial) -> String {
    let place = trial.place.map_or("-".to_owned(), |place| place.to_string());
    let name = trial.fault.name;
    let Some(diagnosis) = &trial.diagnosis else { return format!("{name:<38} -  failed no case") };
    let first = diagnosis.candidates.first().map_or("none fits", |candidate| candidate.fault.as_str());
    let alike = diagnosis.candidates.first().map_or(0, |candidate| candidate.same_effect.len());
    format!(
        "{name:<38} {place:<2} first {first:<38} with {alike} alike, {} of {} fit, {} cases, {:.1} s",
        diagnosis.fitting,
        diagnosis.fitting + diagnosis.ruled_out,
        diagnosis.cases.len(),
        diagnosis.elapsed_s
    )
}

pub(super) fn shrink(args: &ShrinkArgs) -> Result<Exit, CommandError> {
    let (cases, _) = args.cases.selected()?;
    let budget = budget(args.budget_s)?;
    // those that are asked for by name are shrunk whether anything is there to compare with or not
    let is_named = !args.faults.is_empty();
    let faults: Vec<_> =
        chosen(&args.faults)?.into_iter().filter(|fault| is_named || !fault.bugs.is_empty()).collect();
    let progress = Progress::new(faults.len(), "faults");
    let shrunk = |fault: &&'static Fault| {
        let row = row(fault, &cases, budget);
        progress.step();
        row
    };
    let rows: Vec<Row> = faults.par_iter().with_max_len(1).map(shrunk).collect();
    drop(progress);
    print_lines(rows.iter().map(Row::line))?;
    let comparable: Vec<&Row> = rows.iter().filter(|row| !row.bugs.is_empty()).collect();
    let no_larger = comparable.iter().filter(|row| row.bugs.iter().all(|(_, admitted)| *admitted)).count();
    let than_one = comparable.iter().filter(|row| row.bugs.iter().any(|(_, admitted)| *admitted)).count();
    eprintln!(
        "of {} faults whose bugs have a known smallest case, {no_larger} shrink to no more than every one of them, {than_one} to no more than one",
        comparable.len()
    );
    Ok(if no_larger * 10 >= comparable.len() * 9 { Exit::Passed } else { Exit::Failed })
}

struct Row {
    fault: &'static Fault,
    case: Option<Case>,
    bugs: Vec<(&'static str, bool)>,
    tried: usize,
    finished: bool,
}

fn row(fault: &'static Fault, cases: &[Case], budget: Duration) -> Row {
    let mut row = Row { fault, case: None, bugs: Vec::new(), tried: 0, finished: true };
    let mutant = try_one(fault, cases);
    let (Some(property), Some(id)) = (mutant.property, mutant.case) else { return row };
    let known = crate::properties::find(&property);
    let (Some(property), Ok(case)) = (known, id.parse::<Case>()) else { return row };
    let mut engine = CpuEngine::with_fault(fault);
    if fault.class == FaultClass::Hang {
        engine = engine.with_timeout(Duration::from_millis(500));
    }
    let shrunk = shrink_case(&case, &engine, Keep::Property(property.id), budget, &mut |_, _| {});
    let size = Size::of(&shrunk.case);
    let admitted = |bug: &&'static str| known_case(bug)?.admits(size).map(|admitted| (*bug, admitted));
    row.bugs = fault.bugs.iter().filter_map(admitted).collect();
    (row.tried, row.finished, row.case) = (shrunk.tried, shrunk.finished, Some(shrunk.case));
    row
}

impl Row {
    fn line(&self) -> String {
        let name = self.fault.name;
        let Some(case) = &self.case else { return format!("{name:<38} fails no case") };
        let bugs: Vec<String> = self
            .bugs
            .iter()
            .map(|(bug, admitted)| format!("{bug} {}", if *admitted { "no larger" } else { "LARGER" }))
            .collect();
        let end = if self.finished { "" } else { ", out of time" };
        format!(
            "{name:<38} {}  {}  [{}] ({} tried{end})",
            Size::of(case),
            case.id(),
            bugs.join(", "),
            self.tried
        )
    }
}
