//! A plain model of the caches of all ranks: whose token lies in which slot, and with which codes.

use std::collections::HashMap;

use shardcheck_cases::{Import, Turn, cache_code};
use shardcheck_engine::{Conventions, OperationKind, Profile};

use crate::material::AttentionMaterial;

/// A token that must lie in a slot of a rank after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    /// Rank among all ranks.
    pub rank: usize,
    /// Slot of the rank's cache.
    pub slot: usize,
    /// Token among the tokens of the write.
    pub token: usize,
    /// Number of its request.
    pub request: usize,
    /// Its position.
    pub position: usize,
}

/// What the write of one step must do.
#[derive(Debug, Clone, Default)]
pub struct Written {
    /// The slot that each rank writes for each token `[ranks, tokens]`, −1 for none; padding rows stand behind the tokens.
    pub slots: Vec<i64>,
    /// The same as a list: one entry for each group of ranks and token.
    pub stores: Vec<Store>,
    /// Codes of each token by cache, `[tokens, elements]`.
    pub codes: Vec<(&'static str, Vec<Vec<u64>>)>,
}

impl Written {
    /// What the write of a turn must do in an engine of that profile.
    pub fn of(turn: &Turn, attention: &AttentionMaterial, profile: &Profile) -> Self {
        let mut written = Self { codes: codes(turn, attention, profile), ..Self::default() };
        for rank in 0..attention.ranks() {
            let mut token = 0;
            for (index, request) in turn.requests.iter().enumerate() {
                let len = turn.tokens[index].len();
                for position in len - turn.new_tokens[index]..len {
                    let slot = attention.layout.slot(
                        position,
                        attention.dcp_rank(rank),
                        attention.block_table(index),
                    );
                    written.slots.push(slot);
                    if let Ok(slot) = usize::try_from(slot) {
                        written.stores.push(Store { rank, slot, token, request: *request, position });
                    }
                    token += 1;
                }
            }
            written.slots.extend(std::iter::repeat_n(-1, turn.padded_rows));
        }
        written
    }

    /// What an import must do; padding there is none.
    pub fn by_import(
        import: &Import,
        attention: &AttentionMaterial,
        codes: Vec<(&'static str, Vec<Vec<u64>>)>,
    ) -> Self {
        let mut written = Self { codes, ..Self::default() };
        for rank in 0..attention.ranks() {
            let mut token = 0;
            for (index, request) in import.requests.iter().enumerate() {
                for position in 0..import.tokens[index].len() {
                    let member = attention.dcp_rank(rank);
                    let slot = attention.layout.slot(position, member, &import.blocks[index]);
                    written.slots.push(slot);
                    if let Ok(slot) = usize::try_from(slot) {
                        written.stores.push(Store { rank, slot, token, request: *request, position });
                    }
                    token += 1;
                }
            }
        }
        written
    }
}

/// How an engine of that profile casts into its cache.
pub(super) fn write_conventions<'a>(
    attention: &'a AttentionMaterial,
    profile: &'a Profile,
) -> &'a Conventions {
    profile.operation(OperationKind::WriteKv).map_or(&attention.conventions, |o| &o.conventions)
}

fn codes(
    turn: &Turn,
    attention: &AttentionMaterial,
    profile: &Profile,
) -> Vec<(&'static str, Vec<Vec<u64>>)> {
    let conventions = write_conventions(attention, profile);
    let cast = |rows: &[Vec<f32>], elements: usize| cast_new(turn, attention, conventions, rows, elements);
    let shape = attention.configuration().attention;
    let keys = cast(&attention.inputs.keys, shape.kv_heads() * shape.qk_dim());
    let mut codes = vec![("key_cache", keys)];
    if !shape.is_mla() {
        let values = cast(&attention.inputs.values, shape.kv_heads() * shape.value_dim());
        codes.push(("value_cache", values));
    }
    codes
}

/// Codes of the new tokens, which are the last of each request.
fn cast_new(
    turn: &Turn,
    attention: &AttentionMaterial,
    conventions: &Conventions,
    rows: &[Vec<f32>],
    elements: usize,
) -> Vec<Vec<u64>> {
    let of_request = |(rows, new): (&Vec<f32>, &usize)| {
        let first = rows.len() / elements - new;
        let cast = |value: &f32| cache_code(attention.configuration(), conventions, *value);
        rows[first * elements..]
            .chunks_exact(elements)
            .map(|row| row.iter().map(cast).collect())
            .collect::<Vec<Vec<u64>>>()
    };
    rows.iter().zip(&turn.new_tokens).flat_map(of_request).collect()
}

/// Whose token lies in each slot, as far as the steps so far have come.
#[derive(Debug, Default)]
pub struct Owners {
    held: HashMap<(usize, usize), (usize, usize)>,
}

impl Owners {
    /// Takes the write of a step.
    pub fn take(&mut self, written: &Written) {
        for store in &written.stores {
            self.held.insert((store.rank, store.slot), (store.request, store.position));
        }
    }

    /// What lies in a slot, in words.
    pub fn name(&self, rank: usize, slot: usize) -> String {
        match self.held.get(&(rank, slot)) {
            None => "where nothing was written yet".to_owned(),
            Some((request, position)) => {
                format!("which held position {position} of request {request}")
            }
        }
    }
}
