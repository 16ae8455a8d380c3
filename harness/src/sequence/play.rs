//! The driver: takes an engine's session through the steps of a sequence and notes what it answers.

use shardcheck_engine::{Engine, Operation, Reply, Tensors};

use super::SequenceMaterial;
use crate::laboratory::{Halt, Observed, Run};

/// What one run of the engine was seen to do.
#[derive(Debug)]
pub struct Seen {
    /// The caches behind each import that came before the run, where the engine gives them back.
    pub imported: Vec<Option<Reply>>,
    /// The layout of the batch, where the engine derives one.
    pub layout: Option<Observed>,
    /// The write of the new tokens.
    pub write: Observed,
    /// The attention.
    pub attend: Observed,
    /// The caches behind it, where the engine gives them back.
    pub caches: Option<Reply>,
}

/// A session as far as it came.
#[derive(Debug)]
pub struct Play {
    /// The caches before the first step, where the engine gives them back.
    pub before: Option<Reply>,
    /// Runs that came to their end.
    pub seen: Vec<Seen>,
    /// Why the next one did not.
    pub halt: Option<Halt>,
}

impl Play {
    /// Takes a session of the engine through all steps, or as far as it goes.
    ///
    /// # Errors
    /// [`Halt`] when no session can be opened.
    pub fn of(engine: &dyn Engine, material: &SequenceMaterial) -> Result<Self, Halt> {
        let mut run = Run::open(engine, &material.case.configuration)?;
        let before = optional(run.step(&Operation::ReadCache, &Tensors::new()))?.map(|seen| seen.reply);
        let mut play = Self { before, seen: Vec::new(), halt: None };
        for turn in 0..material.turns.len() {
            match take(&mut run, material, turn) {
                Ok(seen) => play.seen.push(seen),
                Err(halt) => {
                    play.halt = Some(at(halt, &material.name(turn)));
                    break;
                }
            }
        }
        Ok(play)
    }

    /// The caches before the run of a turn.
    pub fn caches_before(&self, turn: usize) -> Option<&Reply> {
        self.caches_before_import(turn, self.seen[turn].imported.len())
    }

    /// The caches before an import of a turn; before its run, for as many as there are.
    pub fn caches_before_import(&self, turn: usize, index: usize) -> Option<&Reply> {
        match (index.checked_sub(1), turn.checked_sub(1)) {
            (Some(earlier), _) => self.seen[turn].imported[earlier].as_ref(),
            (None, Some(earlier)) => self.seen[earlier].caches.as_ref(),
            (None, None) => self.before.as_ref(),
        }
    }
}

fn take(run: &mut Run, material: &SequenceMaterial, turn: usize) -> Result<Seen, Halt> {
    let turn = &material.turns[turn];
    let mut imported = Vec::new();
    for import in &turn.imports {
        run.step(&import.operation, &import.inputs)?;
        imported.push(optional(run.step(&Operation::ReadCache, &Tensors::new()))?.map(|seen| seen.reply));
    }
    let layout = optional(run.step(&Operation::Layout, &turn.layout))?;
    let write = run.step(&Operation::WriteKv, &turn.write)?;
    let attend = run.step(&turn.attention.operation(), &turn.attention.step_inputs())?;
    let caches = optional(run.step(&Operation::ReadCache, &Tensors::new()))?.map(|seen| seen.reply);
    Ok(Seen { imported, layout, write, attend, caches })
}

/// What the engine need not do.
fn optional(observed: Result<Observed, Halt>) -> Result<Option<Observed>, Halt> {
    match observed {
        Ok(observed) => Ok(Some(observed)),
        Err(Halt::Unsupported(_)) => Ok(None),
        Err(halt) => Err(halt),
    }
}

/// The same reason, with the step that it belongs to.
fn at(halt: Halt, step: &str) -> Halt {
    match halt {
        Halt::Unsupported(why) => Halt::Unsupported(format!("{step}: {why}")),
        Halt::Inconclusive(why) => Halt::Inconclusive(format!("{step}: {why}")),
        Halt::Engine(status, text) => Halt::Engine(status, format!("{step}: {text}")),
        Halt::Broken(mut failure) => {
            failure.headline = format!("{step}: {}", failure.headline);
            Halt::Broken(failure)
        }
    }
}
