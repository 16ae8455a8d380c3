//! The driver: takes an engine's session through the steps of a sequence and notes what it answers.

use shardcheck_engine::{Operation, Reply, Tensors};

use super::SequenceMaterial;
use crate::laboratory::{Halt, Observed, Run, Watched};

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

/// A session as far as it came, or one KV group of it.
#[derive(Debug, Default)]
pub struct Play {
    /// The caches before the first step, where the engine gives them back.
    pub before: Option<Reply>,
    /// Runs that came to their end.
    pub seen: Vec<Seen>,
    /// Why the next one did not.
    pub halt: Option<Halt>,
    /// The second KV group, where there is one.
    pub second: Option<Box<Play>>,
}

impl Play {
    /// Takes a session of the engine through all steps, or as far as it goes. Each step is taken in the first KV group, then in the
    /// second.
    ///
    /// # Errors
    /// [`Halt`] when no session can be opened.
    pub fn of(engine: &Watched<'_>, material: &SequenceMaterial) -> Result<Self, Halt> {
        let mut run = Run::open(engine, &material.case.configuration)?;
        let mut play = Self::begin(&mut run, material)?;
        while play.halt.is_none() && play.seen.len() < material.turns.len() {
            play.go_on(&mut run, material);
        }
        Ok(play)
    }

    /// A session before its first step.
    pub(super) fn begin(run: &mut Run, material: &SequenceMaterial) -> Result<Self, Halt> {
        let mut play = Self { before: caches(run, 0)?, ..Self::default() };
        if material.second.is_some() {
            play.second = Some(Box::new(Self { before: caches(run, 1)?, ..Self::default() }));
        }
        Ok(play)
    }

    /// Takes the next turn.
    pub(super) fn go_on(&mut self, run: &mut Run, material: &SequenceMaterial) {
        let turn = self.seen.len();
        for group in material.groups() {
            match take(run, group, turn) {
                Ok(seen) if group.group == 0 => self.seen.push(seen),
                Ok(seen) => self.second.get_or_insert_with(Box::default).seen.push(seen),
                Err(halt) => {
                    self.halt = Some(at(halt, &group.name(turn)));
                    return;
                }
            }
        }
    }

    /// The groups of the session, the first one first.
    pub fn groups(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.second.as_deref())
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
    let (turn, group) = (&material.turns[turn], material.group);
    let mut imported = Vec::new();
    for import in &turn.imports {
        run.step(&import.operation.clone().in_group(group), &import.inputs)?;
        imported.push(caches(run, group)?);
    }
    let layout = optional(run.step(&Operation::Layout.in_group(group), &turn.layout))?;
    let write = run.step(&Operation::WriteKv.in_group(group), &turn.write)?;
    let attend = run.step(&turn.attention.operation().in_group(group), &turn.attention.step_inputs())?;
    Ok(Seen { imported, layout, write, attend, caches: caches(run, group)? })
}

/// The caches of a group as they are, where the engine gives them back.
fn caches(run: &mut Run, group: usize) -> Result<Option<Reply>, Halt> {
    let read = run.step(&Operation::ReadCache.in_group(group), &Tensors::new());
    Ok(optional(read)?.map(|seen| seen.reply))
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
