//! The virtual blocks of the KV cache: who holds them, and which prefixes they remember.
//!
//! A full block is remembered under its tokens and the block before it, by value and not by hash, so two prefixes can't
//! be confused. A block that nobody holds stays remembered until its room is needed, the oldest first.

use std::collections::{BTreeMap, HashMap};

use crate::tokenizer::TokenId;

/// A remembered block: what came before it, and its tokens.
type Key = (u64, Box<[TokenId]>);

/// The node before the first block of every sequence.
const ROOT: u64 = 0;

struct Block {
    holders: usize,
    /// Order among blocks that nobody holds: forgotten ones first, then by age.
    stamp: (bool, u64),
    /// Its node, and the key under which it is remembered.
    node: Option<(u64, Key)>,
}

/// The blocks of one sequence.
#[derive(Debug)]
pub struct Lease {
    blocks: Vec<u32>,
    /// Leading blocks that are remembered, or were already when this sequence filled them.
    remembered: usize,
    /// Node of the last of those.
    node: u64,
}

impl Lease {
    /// The block table: virtual block ids in order.
    pub fn table(&self) -> &[u32] {
        &self.blocks
    }
}

/// All blocks of a cache.
pub struct BlockPool {
    block_tokens: usize,
    remembering: bool,
    blocks: Vec<Block>,
    free: BTreeMap<(bool, u64), u32>,
    nodes: HashMap<Key, u32>,
    clock: u64,
}

impl BlockPool {
    /// `blocks` empty blocks of `block_tokens` tokens; `remembering` switches the prefix cache on.
    pub fn new(blocks: usize, block_tokens: usize, remembering: bool) -> Self {
        let block = |stamp| Block { holders: 0, stamp: (false, stamp), node: None };
        let free = (0..blocks as u64).map(|stamp| ((false, stamp), stamp as u32)).collect();
        let blocks: Vec<Block> = (0..blocks as u64).map(block).collect();
        let clock = blocks.len() as u64;
        Self { block_tokens, remembering, blocks, free, nodes: HashMap::new(), clock }
    }

    /// Blocks that a sequence of `tokens` needs.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Number of blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that some sequence holds.
    pub fn held(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Blocks for a sequence that starts with `prompt` and may grow to `total_tokens`, and how many of the prompt's tokens
    /// are in the cache already. At least one prompt token is never taken from the cache, since its logits are needed;
    /// `reuse` = false takes none. `None` if there is no room now.
    pub fn lease(&mut self, prompt: &[TokenId], total_tokens: usize, reuse: bool) -> Option<(Lease, usize)> {
        let (found, node) = if reuse { self.remembered(prompt) } else { (Vec::new(), ROOT) };
        let fresh = self.blocks_for(total_tokens).saturating_sub(found.len());
        let unheld = found.iter().filter(|id| self.blocks[**id as usize].holders == 0).count();
        if fresh + unheld > self.free.len() {
            return None;
        }
        for id in &found {
            self.hold(*id);
        }
        let cached_tokens = found.len() * self.block_tokens;
        let mut lease = Lease { remembered: found.len(), blocks: found, node };
        for _ in 0..fresh {
            let (_, id) =
                self.free.first_key_value().map(|(stamp, id)| (*stamp, *id)).expect("room was counted");
            self.hold(id);
            self.forget(id);
            lease.blocks.push(id);
        }
        Some((lease, cached_tokens))
    }

    /// Remembers the blocks of a sequence that its first `tokens`, whose keys and values are all stored, fill.
    pub fn remember(&mut self, lease: &mut Lease, tokens: &[TokenId]) {
        if !self.remembering {
            return;
        }
        while (lease.remembered + 1) * self.block_tokens <= tokens.len() {
            let start = lease.remembered * self.block_tokens;
            let key: Key = (lease.node, tokens[start..start + self.block_tokens].into());
            let id = lease.blocks[lease.remembered];
            lease.remembered += 1;
            if let Some(twin) = self.nodes.get(&key) {
                // Another sequence was first: go on from its node, and let this block be forgotten on release.
                let (node, _) = self.blocks[*twin as usize].node.as_ref().expect("a listed block has a node");
                lease.node = *node;
                continue;
            }
            self.clock += 1;
            lease.node = self.clock;
            self.blocks[id as usize].node = Some((self.clock, key.clone()));
            self.nodes.insert(key, id);
        }
    }

    /// Gives the blocks of a sequence back. Later blocks age first, since they are of no use without earlier ones.
    pub fn release(&mut self, lease: Lease) {
        for id in lease.blocks.into_iter().rev() {
            self.clock += 1;
            let block = &mut self.blocks[id as usize];
            block.holders -= 1;
            if block.holders == 0 {
                block.stamp = (block.node.is_some(), self.clock);
                self.free.insert(block.stamp, id);
            }
        }
    }

    /// Forgets every prefix: what the blocks held is lost.
    pub fn forget_all(&mut self) {
        self.nodes.clear();
        self.blocks.iter_mut().for_each(|block| block.node = None);
    }

    /// The remembered blocks that `prompt` starts with, and the node of the last.
    fn remembered(&self, prompt: &[TokenId]) -> (Vec<u32>, u64) {
        let (mut found, mut node) = (Vec::new(), ROOT);
        let usable = prompt.len().saturating_sub(1);
        for tokens in prompt[..usable].chunks_exact(self.block_tokens) {
            let Some(id) = self.nodes.get(&(node, tokens.into())) else { break };
            node = self.blocks[*id as usize].node.as_ref().expect("a listed block has a node").0;
            found.push(*id);
        }
        (found, node)
    }

    fn hold(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        if block.holders == 0 {
            self.free.remove(&block.stamp);
        }
        block.holders += 1;
    }

    fn forget(&mut self, id: u32) {
        if let Some((_, key)) = self.blocks[id as usize].node.take() {
            self.nodes.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pool: &mut BlockPool, prompt: &[TokenId], total: usize) -> (Vec<u32>, usize) {
        let (mut lease, cached) = pool.lease(prompt, total, true).expect("room");
        pool.remember(&mut lease, prompt);
        let table = lease.table().to_vec();
        pool.release(lease);
        (table, cached)
    }

    #[test]
    fn a_second_sequence_gets_the_blocks_of_the_common_prefix() {
        let mut pool = BlockPool::new(8, 4, true);
        let first: Vec<TokenId> = (0..10).collect();
        let (table, cached) = run(&mut pool, &first, 12);
        assert_eq!((table.len(), cached), (3, 0));
        let second: Vec<TokenId> = (0..8).chain([77, 78, 79]).collect();
        let (again, cached) = run(&mut pool, &second, 12);
        assert_eq!((cached, &again[..2]), (8, &table[..2]));
        let other: Vec<TokenId> = [1].into_iter().chain(1..10).collect();
        assert_eq!(run(&mut pool, &other, 12).1, 0, "the first token differs");
    }

    #[test]
    fn a_pool_that_has_forgotten_all_offers_nothing_and_works_on() {
        let mut pool = BlockPool::new(4, 2, true);
        run(&mut pool, &[1, 2, 3, 4, 5], 6);
        pool.forget_all();
        assert_eq!(run(&mut pool, &[1, 2, 3, 4, 5], 8).1, 0);
        assert_eq!((run(&mut pool, &[1, 2, 3, 4, 5], 8).1, pool.held()), (4, 0));
    }

    #[test]
    fn equal_tokens_after_another_block_are_not_the_same_prefix() {
        let mut pool = BlockPool::new(8, 2, true);
        run(&mut pool, &[1, 2, 3, 4, 5], 5);
        assert_eq!(run(&mut pool, &[9, 9, 3, 4, 5], 5).1, 0);
        assert_eq!(run(&mut pool, &[3, 4, 5], 3).1, 0);
        assert_eq!(run(&mut pool, &[1, 2, 3, 4, 5], 5).1, 4);
    }

    #[test]
    fn the_last_prompt_token_is_always_left_to_compute() {
        let mut pool = BlockPool::new(8, 4, true);
        run(&mut pool, &[1, 2, 3, 4, 5, 6, 7, 8], 9);
        assert_eq!(run(&mut pool, &[1, 2, 3, 4, 5, 6, 7, 8], 9).1, 4);
        assert_eq!(run(&mut pool, &[1, 2, 3, 4], 5).1, 0);
    }

    #[test]
    fn a_sequence_without_room_waits_and_a_shared_block_counts_once() {
        let mut pool = BlockPool::new(4, 2, true);
        let (mut one, _) = pool.lease(&[1, 2, 3, 4, 5], 6, true).expect("three of four blocks");
        pool.remember(&mut one, &[1, 2, 3, 4, 5]);
        assert!(pool.lease(&[8, 8, 8], 4, true).is_none(), "two blocks, one is free");
        let (two, cached) = pool.lease(&[1, 2, 3, 4, 6], 6, true).expect("two blocks are shared");
        assert_eq!((cached, pool.held()), (4, 4));
        pool.release(one);
        assert_eq!(pool.held(), 3);
        pool.release(two);
        assert_eq!(pool.held(), 0);
    }

    #[test]
    fn room_is_taken_from_forgotten_blocks_then_from_the_oldest_remembered() {
        let mut pool = BlockPool::new(4, 2, true);
        run(&mut pool, &[1, 2, 3], 3); // one remembered, one forgotten
        run(&mut pool, &[4, 5, 6], 3);
        assert_eq!(run(&mut pool, &[4, 5, 6], 3).1, 2);
        assert_eq!(run(&mut pool, &[1, 2, 3], 3).1, 2);
        run(&mut pool, &[7, 8, 9, 10, 11, 12], 6); // needs three: two forgotten, and [4, 5]
        assert_eq!(run(&mut pool, &[1, 2, 3], 3).1, 2, "used last, so still there");
        assert_eq!(run(&mut pool, &[4, 5, 6], 3).1, 0, "oldest, so taken");
    }

    #[test]
    fn nothing_is_remembered_when_the_cache_is_off_or_reuse_is_declined() {
        let mut pool = BlockPool::new(4, 2, false);
        run(&mut pool, &[1, 2, 3], 3);
        assert_eq!(run(&mut pool, &[1, 2, 3], 3).1, 0);
        let mut pool = BlockPool::new(4, 2, true);
        run(&mut pool, &[1, 2, 3], 3);
        let (lease, cached) = pool.lease(&[1, 2, 3], 3, false).expect("room");
        assert_eq!(cached, 0);
        pool.release(lease);
    }
}
