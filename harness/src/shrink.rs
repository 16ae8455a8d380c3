//! Shrinking: the smallest case that still fails in the same way, over every axis, the parallel ones included.
//!
//! A descent takes the smallest of all single steps that still fails, until none does; an enumeration from below then looks for
//! smaller cases that no single step reaches, and the descent goes on from there. Nothing is drawn, so equal arguments
//! give equal cases, unless the time runs out first.

mod experts;
mod known;
mod ladder;
mod moves;
mod prefill;
mod session;
mod size;
mod sparse;
mod stack;

use std::time::{Duration, Instant};

use rayon::prelude::*;
use shardcheck_cases::Case;
use shardcheck_engine::Engine;

pub use known::{Bug, SMALLEST_CASES, known_case};
pub use size::{Size, work};

use crate::event::CaseResult;
use crate::properties;
use crate::quiet::Quiet;
use crate::run::judge_case;
use crate::status::Status;

/// What must stay the same while a case shrinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The property that fails.
    Property(&'static str),
    /// Only that something fails.
    AnyFailure,
}

impl Keep {
    /// Whether `case` fails on `engine` in this way. The harness's own failures are none of the engine's.
    pub fn is_met_by(self, case: &Case, engine: &dyn Engine) -> bool {
        let result = match self {
            Self::Property(id) => {
                if !properties::find(id).is_some_and(|property| property.is_for(case)) {
                    return false;
                }
                judge_case(case, engine, &|property| property.id == id)
            }
            Self::AnyFailure => judge_case(case, engine, &|_| true),
        };
        is_failure_of_the_engine(&result)
    }
}

/// A smaller case.
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// The smallest failing case that was found; the given one when nothing smaller fails.
    pub case: Case,
    /// Cases that were tried.
    pub tried: usize,
    /// Whether the search came to its own end rather than to that of its time.
    pub finished: bool,
    /// Seconds that it took.
    pub elapsed_s: f64,
}

/// Cases that are tried at the same time: enough for the cores, few enough that a success early in the list costs little.
const BATCH: usize = 16;

/// Shrinks `case`, which fails on `engine` in the way that `keep` names. `progress` is told of every smaller case.
pub fn shrink(
    case: &Case,
    engine: &dyn Engine,
    keep: Keep,
    budget: Duration,
    progress: &mut dyn FnMut(&Case, usize),
) -> Shrunk {
    let _quiet = Quiet::new();
    let mut search = Search { engine, keep, started: Instant::now(), budget, tried: 0, finished: true };
    let mut best = case.clone();
    loop {
        best = search.descend(best, progress);
        match search.first_failing(&ladder::below(&best)) {
            Some(smaller) => {
                progress(&smaller, search.tried);
                best = smaller;
            }
            None => break,
        }
    }
    Shrunk {
        case: best,
        tried: search.tried,
        finished: search.finished,
        elapsed_s: search.started.elapsed().as_secs_f64(),
    }
}

/// The first property that fails on `case`, to shrink towards; `None` when the case passes.
pub fn failing_property(case: &Case, engine: &dyn Engine) -> Option<&'static str> {
    let result = judge_case(case, engine, &|_| true);
    result.failures().find_map(|check| properties::find(&check.property)).map(|property| property.id)
}

struct Search<'a> {
    engine: &'a dyn Engine,
    keep: Keep,
    started: Instant,
    budget: Duration,
    tried: usize,
    finished: bool,
}

impl Search<'_> {
    fn descend(&mut self, mut best: Case, progress: &mut dyn FnMut(&Case, usize)) -> Case {
        while let Some(smaller) = self.first_failing(&moves::moves(&best)) {
            progress(&smaller, self.tried);
            best = smaller;
        }
        best
    }

    /// The first of `cases` that fails, whatever the number of threads; `None` when none does or the time is up.
    fn first_failing(&mut self, cases: &[Case]) -> Option<Case> {
        for batch in cases.chunks(BATCH) {
            if self.started.elapsed() > self.budget {
                self.finished = false;
                return None;
            }
            let (engine, keep) = (self.engine, self.keep);
            let found = batch.par_iter().with_max_len(1).position_first(|case| keep.is_met_by(case, engine));
            self.tried += found.map_or(batch.len(), |place| place + 1);
            if let Some(place) = found {
                return Some(batch[place].clone());
            }
        }
        None
    }
}

fn is_failure_of_the_engine(result: &CaseResult) -> bool {
    result.status.is_failure() && result.status != Status::HarnessError
}

#[cfg(test)]
mod tests;
