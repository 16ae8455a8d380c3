//! The run loop: cases judged in parallel, every verdict on disk before the next line is shown.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use shardcheck_cases::Case;
use shardcheck_engine::Engine;

use crate::boundary::{boundary_faults, try_boundary};
use crate::claims::Claims;
use crate::diagnose::{MOST_CASES, diagnose, evidence_of};
use crate::event::{CaseResult, Event};
use crate::matrix::{KillState, Row};
use crate::mutants::{self, Mutant, MutantState};
use crate::recording::{Recorder, Recording};
use crate::run::judge_case;
use crate::run_directory::{self, RunDirectory, RunDirectoryError};
use crate::select::Selection;
use crate::status::{Exit, Status};
use crate::store;

/// What a run is to do.
pub struct Plan<'a> {
    /// Selected cases that are not judged yet.
    pub cases: &'a [Case],
    /// Ids of all cases of the run, in the order of `cases`.
    pub selection: &'a Selection,
    /// The engine under test.
    pub engine: &'a dyn Engine,
    /// Whether a known fault was injected into it: something must fail then.
    pub is_faulty: bool,
    /// Cases judged at the same time.
    pub jobs: usize,
    /// Whether the first failure ends the run.
    pub fail_fast: bool,
    /// How long failures may be diagnosed for after the cases, and on how many threads; `None` for not at all.
    pub diagnosis: Option<(Duration, usize)>,
    /// Cases on which faults are tried after the cases; empty for none.
    pub mutant_cases: &'a [Case],
    /// Claims that failures are held against, and all cases of the run, judged before or not.
    pub claims: Option<(&'a Claims, &'a [Case])>,
    /// What was judged before, when the run is resumed: reported again, never judged again.
    pub before: Vec<CaseResult>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code.
    pub exit: Exit,
    /// Whether a failure ended it before all cases were judged.
    pub cut_short: bool,
}

/// Why a run could not be carried through. What was judged until then is on disk.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The run folder.
    #[error(transparent)]
    Folder(#[from] RunDirectoryError),
    /// The folder of a failed case.
    #[error("failed to store a failed case: {0}")]
    Store(#[from] store::StoreError),
    /// The thread pool.
    #[error("failed to start {jobs} worker threads: {reason}")]
    Threads {
        /// Number of threads.
        jobs: usize,
        /// What the system said.
        reason: String,
    },
}

enum Message {
    Judged(Box<(Case, CaseResult, Option<Recording>)>),
    Mutant(Mutant),
}

/// Carries a plan through. Every event goes to the run folder first, then to `show`.
///
/// # Errors
/// [`ExecuteError`].
pub fn execute(
    plan: &Plan<'_>,
    directory: &mut RunDirectory,
    show: &mut dyn FnMut(&Event),
) -> Result<Outcome, ExecuteError> {
    let started = Instant::now();
    let pool = threads_of(plan.jobs.min(plan.cases.len().max(plan.mutant_cases.len()).max(1)))?;
    show(&Event::RunStarted(Box::new(directory.header().clone())));
    for result in &plan.before {
        show(&Event::CaseJudged(result.clone()));
    }
    let stop = AtomicBool::new(false);
    let (send, receive) = mpsc::channel();
    let mut statuses: Vec<Status> = plan.before.iter().map(|result| result.status).collect();
    let mut survivors = 0usize;
    let mut judged = HashSet::new();
    let result = std::thread::scope(|scope| -> Result<(), ExecuteError> {
        scope.spawn(|| {
            let send = send;
            pool.install(|| produce(plan, &stop, &send));
        });
        for message in receive {
            if let Err(error) =
                take(message, plan, directory, show, &mut statuses, &mut survivors, &mut judged)
            {
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
            if plan.fail_fast && statuses.iter().any(|status| status.is_failure()) {
                stop.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    });
    result?;
    let failed = statuses.iter().any(|status| status.is_failure());
    if let Some((budget, threads)) = plan.diagnosis.filter(|_| failed) {
        // what was stored is diagnosed, so that `diagnose` says the same of the folder later
        let record = run_directory::read_events(directory.path())?;
        // one case that failed is no reason to try faults one by one
        let diagnosis = threads_of(threads)?.install(|| -> Result<_, ExecuteError> {
            let evidence = evidence_of(directory.path(), &record, MOST_CASES, budget / 2)?;
            Ok(diagnose(&evidence, budget / 2))
        })?;
        if let Some(diagnosis) = diagnosis {
            let event = Event::Diagnosed(Box::new(diagnosis));
            directory.append(&event)?;
            show(&event);
        }
    }
    let cut_short = judged.len() < plan.cases.len();
    let counts = crate::record::count_statuses(statuses.iter().copied());
    if !cut_short {
        statuses.extend(conclude(plan, directory, show)?);
    }
    // claims may expect what a fault does
    let shown = statuses.iter().any(|status| status.is_failure() || *status == Status::ExpectedFail);
    survivors += usize::from(plan.is_faulty && !shown);
    let exit = match exit_of(&statuses, survivors, cut_short) {
        // a part of a run may hold nothing that the engine does; a run that decides nothing is no pass
        Exit::Passed if plan.selection.partition.is_none() => Exit::of_judged(&statuses),
        exit => exit,
    };
    let event =
        Event::RunFinished { counts, elapsed_s: started.elapsed().as_secs_f64(), exit_code: exit.code() };
    directory.append(&event)?;
    directory.finish()?;
    show(&event);
    Ok(Outcome { exit, cut_short })
}

fn threads_of(jobs: usize) -> Result<rayon::ThreadPool, ExecuteError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(jobs).build();
    pool.map_err(|error| ExecuteError::Threads { jobs, reason: error.to_string() })
}

/// Judges the entries of the claims by everything that the run has on disk, what was judged before a resume included.
fn conclude(
    plan: &Plan<'_>,
    directory: &mut RunDirectory,
    show: &mut dyn FnMut(&Event),
) -> Result<Vec<Status>, ExecuteError> {
    let Some((claims, cases)) = plan.claims else { return Ok(Vec::new()) };
    let record = run_directory::read_events(directory.path())?;
    let selects = |id: &str, case: &Case, property: &str| plan.selection.matches_property(id, case, property);
    let verdicts = claims.conclude(cases, &selects, &record);
    let statuses = verdicts.iter().map(|verdict| verdict.status).collect();
    for verdict in verdicts {
        let event = Event::ClaimJudged(verdict);
        directory.append(&event)?;
        show(&event);
    }
    Ok(statuses)
}

fn exit_of(statuses: &[Status], survivors: usize, cut_short: bool) -> Exit {
    match Exit::of(statuses.iter().copied()) {
        // a fault that survives says more about the run than a case that could not be decided
        Exit::Passed | Exit::Inconclusive if survivors > 0 => Exit::MutantsSurvived,
        Exit::Passed if cut_short => Exit::RerunOutstanding,
        exit => exit,
    }
}

fn produce(plan: &Plan<'_>, stop: &AtomicBool, send: &mpsc::Sender<Message>) {
    plan.cases.par_iter().with_max_len(1).for_each_with(send.clone(), |send, case| {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let id = case.id();
        let recorder = Recorder::new(plan.engine);
        let only =
            |property: &crate::properties::Property| plan.selection.matches_property(&id, case, property.id);
        let mut result = judge_case(case, &recorder, &only);
        if let Some((claims, _)) = plan.claims {
            claims.mark(case, &mut result);
        }
        let recording = result.status.is_failure().then(|| recorder.recording());
        // the receiver is gone only after an error that ends the run
        let _ = send.send(Message::Judged(Box::new((case.clone(), result, recording))));
    });
    if plan.mutant_cases.is_empty() || stop.load(Ordering::Relaxed) {
        return;
    }
    let faults: Vec<_> = shardcheck_cpu::faults().iter().collect();
    let send = std::sync::Mutex::new(send.clone());
    mutants::try_all(&faults, plan.mutant_cases, &|mutant| {
        if let Ok(send) = send.lock() {
            let _ = send.send(Message::Mutant(mutant.clone()));
        }
    });
    let faults: Vec<_> = boundary_faults().collect();
    try_boundary(&faults, plan.engine, plan.mutant_cases, &|row| {
        if let (Some(mutant), Ok(send)) = (tried_at_the_boundary(row), send.lock()) {
            let _ = send.send(Message::Mutant(mutant));
        }
    });
}

/// A fault at the boundary as a mutant; `None` where there was nothing to tamper with.
fn tried_at_the_boundary(row: &Row) -> Option<Mutant> {
    let state = match row.state {
        KillState::Killed => MutantState::Killed,
        KillState::NotApplicable => return None,
        _ => MutantState::Survived,
    };
    Some(Mutant {
        fault: format!("boundary:{}", row.fault),
        state,
        property: row.property.clone(),
        case: row.case.clone(),
        tried: row.tried,
    })
}

fn take(
    message: Message,
    plan: &Plan<'_>,
    directory: &mut RunDirectory,
    show: &mut dyn FnMut(&Event),
    statuses: &mut Vec<Status>,
    survivors: &mut usize,
    judged: &mut HashSet<String>,
) -> Result<(), ExecuteError> {
    match message {
        Message::Mutant(mutant) => {
            *survivors += usize::from(mutant.state != MutantState::Killed);
            let event = mutant_event(&mutant);
            directory.append(&event)?;
            show(&event);
        }
        Message::Judged(judgement) => {
            let (case, result, recording) = *judgement;
            if plan.fail_fast && statuses.iter().any(|status| status.is_failure()) {
                return Ok(());
            }
            statuses.push(result.status);
            judged.insert(result.id.clone());
            if let Some(recording) = recording {
                let folder = directory.case_directory(&result.id)?;
                store::write(&folder, &case, &recording, &result)?;
                let event = Event::CaseFailed { id: result.id.clone(), case: Box::new(case) };
                directory.append(&event)?;
                show(&event);
            }
            let event = Event::CaseJudged(result);
            directory.append(&event)?;
            show(&event);
        }
    }
    Ok(())
}

/// The event of a fault that was tried.
pub fn mutant_event(mutant: &Mutant) -> Event {
    Event::MutantTried {
        fault: mutant.fault.clone(),
        state: mutant.state.name().to_owned(),
        property: mutant.property.clone(),
        case: mutant.case.clone(),
        tried: mutant.tried,
    }
}
