//! Sequences: what a session's steps are given and must leave behind, and what an engine was seen to do in them.

mod model;
mod play;

use shardcheck_cases::{Import, SequenceCase, Turn, turns};
use shardcheck_engine::{Operation, OperationKind, Profile, Tensors};

use crate::event::Coverage;
use crate::material::AttentionMaterial;

pub use model::{Owners, Store, Written};
pub use play::{Play, Seen};

/// What the seed of the second KV group's content is off by.
const SECOND_GROUP_SEED: u64 = 0x2B;

/// Material of a sequence: its runs, in order.
pub struct SequenceMaterial {
    /// The case.
    pub case: SequenceCase,
    /// The runs of the engine.
    pub turns: Vec<TurnMaterial>,
    /// The same runs in the second KV group of the session, where there is one.
    pub second: Option<Box<SequenceMaterial>>,
    /// Number of the KV group.
    pub group: usize,
}

/// One run: what the engine is given, what attention must give, and what must lie in the caches behind it.
pub struct TurnMaterial {
    /// What the scheduler decided.
    pub turn: Turn,
    /// The run as a case of one step, with its oracle.
    pub attention: AttentionMaterial,
    /// Inputs of the write: the new tokens and the padding rows behind them.
    pub write: Tensors,
    /// Inputs of the layout step.
    pub layout: Tensors,
    /// Where each new token belongs.
    pub written: Written,
    /// What comes from other sessions before the run.
    pub imports: Vec<ImportMaterial>,
}

/// Requests that come from a session of another layout.
pub struct ImportMaterial {
    /// What the scheduler decided.
    pub import: Import,
    /// The operation.
    pub operation: Operation,
    /// Its inputs.
    pub inputs: Tensors,
    /// Where each token belongs.
    pub written: Written,
}

impl SequenceMaterial {
    /// Makes the material of a sequence for an engine of that profile.
    ///
    /// # Errors
    /// Why the case can't be judged against such an engine.
    pub fn new(case: &SequenceCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        if profile.operation(OperationKind::WriteKv).is_none() {
            return Err("the engine does not declare write_kv, without which there is no sequence".to_owned());
        }
        let mut first = Self::of_group(0, case, seed, profile)?;
        if let Some(second) = case.in_second_group()? {
            // other blocks and other content, so that what is taken from the wrong group shows
            let own = Self::of_group(1, &second, seed.wrapping_add(SECOND_GROUP_SEED), profile)?;
            first.second = Some(Box::new(own));
        }
        Ok(first)
    }

    fn of_group(group: usize, case: &SequenceCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let turns = turns(case, seed)?
            .into_iter()
            .map(|turn| TurnMaterial::new(turn, case, seed, profile))
            .collect::<Result<_, _>>()?;
        Ok(Self { case: case.clone(), turns, second: None, group })
    }

    /// The groups of the session, the first one first.
    pub fn groups(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.second.as_deref())
    }

    /// A turn in words: the number of its step and the step as it stands in the id.
    pub fn name(&self, turn: usize) -> String {
        let step = self.turns[turn].turn.step;
        let group = if self.group == 0 { "" } else { " in the second KV group" };
        format!("step {} ({}){group}", step + 1, self.case.steps[step])
    }

    /// An import before a turn in words, likewise.
    pub fn import_name(&self, turn: usize, index: usize) -> String {
        let step = self.turns[turn].imports[index].import.step;
        format!("step {} ({})", step + 1, self.case.steps[step])
    }

    /// The batch of a turn in words: which request has how many tokens.
    pub fn batch(&self, turn: usize) -> String {
        let turn = &self.turns[turn].turn;
        let words: Vec<String> = turn
            .requests
            .iter()
            .zip(turn.tokens.iter().zip(&turn.new_tokens))
            .map(|(request, (tokens, new))| format!("{request} ({} tokens, {new} new)", tokens.len()))
            .collect();
        format!("batch of requests {}", words.join(", "))
    }

    /// What the sequence reaches.
    pub fn coverage(&self) -> Coverage {
        let mut all = Coverage::default();
        for turn in self.groups().flat_map(|group| &group.turns) {
            let one = turn.attention.coverage();
            all.rows += one.rows;
            all.masked_rows += one.masked_rows;
            all.shards += one.shards;
            all.empty_shards += one.empty_shards;
        }
        all
    }
}

impl TurnMaterial {
    fn new(turn: Turn, case: &SequenceCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let inputs = turn.inputs(case, seed);
        let (write, layout) = (inputs.write_new(), inputs.layout());
        let attention = AttentionMaterial::over(turn.kind.family(), turn.case(case), seed, profile, inputs)?;
        let written = Written::of(&turn, &attention, profile);
        let imports =
            turn.imports.iter().map(|import| ImportMaterial::new(import, case, seed, &attention, profile));
        let imports = imports.collect();
        Ok(Self { turn, attention, write, layout, written, imports })
    }
}

impl ImportMaterial {
    fn new(
        import: &Import,
        case: &SequenceCase,
        seed: u64,
        attention: &AttentionMaterial,
        profile: &Profile,
    ) -> Self {
        let conventions = model::write_conventions(attention, profile);
        Self {
            import: import.clone(),
            operation: Operation::ImportCache { source: import.source },
            inputs: import.inputs(case, seed, conventions),
            written: Written::by_import(import, attention, import.codes(case, seed, conventions)),
        }
    }
}

#[cfg(test)]
mod machine;
#[cfg(test)]
mod tests;
