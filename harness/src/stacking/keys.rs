//! What the caches of a stack must hold: for each layer and slot the key that an engine last showed for it.

use std::collections::HashMap;

use shardcheck_cases::StackTurn;

use super::{Shown, StackMaterial, place};
use crate::laboratory::Halt;

/// Keys by layer among those with latent attention, block and place in its virtual block, as each rank had them when the token was computed,
/// or got them of the rank of prefill context parallelism that computed it.
pub struct KeyStore<'a> {
    material: &'a StackMaterial,
    keys: HashMap<(usize, i32, usize), Vec<Vec<f32>>>,
}

impl<'a> KeyStore<'a> {
    /// Nothing written yet.
    pub fn new(material: &'a StackMaterial) -> Self {
        Self { material, keys: HashMap::new() }
    }

    fn slot(&self, turn: &StackTurn, index: usize, position: usize) -> (i32, usize) {
        let tokens = self.material.layout.virtual_block_tokens();
        (turn.turn.blocks[index][position / tokens], position % tokens)
    }

    /// Takes the new rows of a run: whatever was in their slots is gone.
    ///
    /// # Errors
    /// As [`Shown::tensor`].
    pub fn write(&mut self, turn: &StackTurn, shown: &Shown<'_>) -> Result<(), Halt> {
        let keys = shown.tensor("key")?;
        for row in 0..shown.real_rows {
            let Some((index, position)) = place(turn, row) else { continue };
            let (block, offset) = self.slot(turn, index, position);
            for layer in 0..self.material.latent.len() {
                let tp = self.material.ranks();
                let of_rank = |rank: usize| match shown.lanes.held(rank / tp, rank % tp, row) {
                    Some((holder, place)) => keys.row(&[holder, layer, place]).to_vec(),
                    None => vec![f32::NAN; keys.shape[3]],
                };
                let all = (0..self.material.all_ranks()).map(of_rank).collect();
                self.keys.insert((layer, block, offset), all);
            }
        }
        Ok(())
    }

    /// Keys of each request of a run, `[L, Dk]`, as the ranks of one group that own them wrote them. A slot that nothing was written to is NaN.
    pub fn of_group(&self, turn: &StackTurn, layer: usize, group: usize) -> Vec<Vec<f32>> {
        let width = self.material.configuration().attention.qk_dim();
        let of_request = |(index, tokens): (usize, &Vec<u32>)| {
            (0..tokens.len())
                .flat_map(|position| {
                    let (block, offset) = self.slot(turn, index, position);
                    let owner = group * self.material.layout.world() + self.material.layout.owner(position);
                    let known = self.keys.get(&(layer, block, offset));
                    known.map_or_else(|| vec![f32::NAN; width], |ranks| ranks[owner].clone())
                })
                .collect()
        };
        turn.turn.tokens.iter().enumerate().map(of_request).collect()
    }
}
