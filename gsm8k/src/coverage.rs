//! What a run can have reached in a sharded KV cache: context lengths, tokens on a rank, empty shards, block edges.

use serde::{Deserialize, Serialize};

use crate::samples::Answer;

/// How the server shards its KV cache, as its operator states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharding {
    /// Ranks that share the cache, `W`.
    pub dcp: u64,
    /// Consecutive tokens that go to the same rank, `S`.
    pub interleave: u64,
    /// Tokens in a block of one rank, `B`; a virtual block holds `B·W` tokens.
    pub block_size: Option<u64>,
}

impl Sharding {
    /// Tokens of the first `length` that lie on `rank`: whole rounds of `W·S`, and its part of the last one.
    ///
    /// Source: vLLM `get_dcp_local_seq_lens`.
    pub fn tokens_on(&self, rank: u64, length: u64) -> u64 {
        let round = self.dcp * self.interleave;
        let rest = length % round;
        length / round * self.interleave + rest.saturating_sub(rank * self.interleave).min(self.interleave)
    }

    /// The shortest length at which no rank is empty.
    pub fn shortest_without_empty_shard(&self) -> u64 {
        (self.dcp - 1) * self.interleave + 1
    }
}

/// The lengths that a run's requests went through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reach {
    /// Answered requests whose token counts the server gave; the rest are not in these figures.
    pub counted: usize,
    /// Shortest prompt, in tokens.
    pub shortest_prompt: u64,
    /// Longest prompt, in tokens.
    pub longest_prompt: u64,
    /// Longest sequence, prompt and completion, in tokens.
    pub longest_sequence: u64,
    /// What this means for the stated sharding.
    pub shards: Option<ShardReach>,
}

/// What a run reached in the shards of the KV cache while decoding.
///
/// A request of `p` prompt and `c` completion tokens decodes at context lengths `p + 1 … p + c − 1`: its first
/// token comes from the prefill, and nothing is computed after its last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReach {
    /// The stated sharding.
    pub sharding: Sharding,
    /// Most tokens that rank 0, the fullest, ever held.
    pub most_on_a_rank: u64,
    /// Fewest tokens that the last rank, the emptiest, held while decoding.
    pub fewest_on_a_rank: u64,
    /// Requests that decoded with at least one rank empty.
    pub with_empty_shard: usize,
    /// Different positions within a round of `W·S` tokens at which some request decoded.
    pub residues_seen: u64,
    /// Virtual blocks that the longest sequence filled or began.
    pub virtual_blocks: Option<u64>,
    /// Requests that crossed from one virtual block into the next while decoding.
    pub crossed_virtual_block: Option<usize>,
}

impl Reach {
    /// The reach of a run; `None` when the server gave no token counts.
    pub fn of(answers: &[Answer], sharding: Option<Sharding>) -> Option<Self> {
        let lengths: Vec<(u64, u64)> = answers
            .iter()
            .filter_map(|answer| Some((answer.prompt_tokens?, answer.completion_tokens?)))
            .collect();
        Some(Self {
            counted: lengths.len(),
            shortest_prompt: lengths.iter().map(|(prompt, _)| *prompt).min()?,
            longest_prompt: lengths.iter().map(|(prompt, _)| *prompt).max()?,
            longest_sequence: lengths.iter().map(|(prompt, completion)| prompt + completion).max()?,
            shards: sharding.map(|sharding| ShardReach::of(&lengths, sharding)),
        })
    }
}

impl ShardReach {
    fn of(lengths: &[(u64, u64)], sharding: Sharding) -> Self {
        let round = sharding.dcp * sharding.interleave;
        let last = sharding.dcp - 1;
        let virtual_block = sharding.block_size.map(|size| size * sharding.dcp);
        let mut residues = vec![false; round as usize];
        let mut fewest = u64::MAX;
        let mut with_empty_shard = 0;
        let mut crossed = 0;
        for (prompt, completion) in lengths.iter().filter(|(_, completion)| *completion >= 2) {
            let (first, end) = (prompt + 1, prompt + completion - 1);
            fewest = fewest.min(sharding.tokens_on(last, first));
            with_empty_shard += usize::from(first < sharding.shortest_without_empty_shard());
            for length in first..=end.min(first + round - 1) {
                residues[(length % round) as usize] = true;
            }
            // the token at position `length - 1` opens a virtual block when that position is a multiple of it
            crossed += usize::from(virtual_block.is_some_and(|size| (end - 1) / size > (first - 1) / size));
        }
        let longest = lengths.iter().map(|(prompt, completion)| prompt + completion).max().unwrap_or(0);
        Self {
            sharding,
            most_on_a_rank: sharding.tokens_on(0, longest),
            fewest_on_a_rank: if fewest == u64::MAX { 0 } else { fewest },
            with_empty_shard,
            residues_seen: residues.iter().filter(|seen| **seen).count() as u64,
            virtual_blocks: virtual_block.map(|size| longest.div_ceil(size)),
            crossed_virtual_block: virtual_block.map(|_| crossed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARDING: Sharding = Sharding { dcp: 8, interleave: 1, block_size: Some(16) };

    fn answer(prompt_tokens: u64, completion_tokens: u64) -> Answer {
        Answer {
            doc_id: 0,
            prompt_hash: String::new(),
            text: Some(String::new()),
            scored: Default::default(),
            rescoring_differs: 0,
            finish_reason: None,
            prompt_tokens: Some(prompt_tokens),
            completion_tokens: Some(completion_tokens),
            latency_s: None,
            attempts: 1,
            acceptance: None,
            error: None,
        }
    }

    #[test]
    fn tokens_are_dealt_out_in_rounds_and_none_is_lost() {
        for (dcp, interleave) in [(1, 1), (2, 1), (4, 3), (8, 64)] {
            let sharding = Sharding { dcp, interleave, block_size: None };
            for length in 0..1100 {
                let owner = |token: u64| token / interleave % dcp;
                for rank in 0..dcp {
                    let counted = (0..length).filter(|token| owner(*token) == rank).count() as u64;
                    assert_eq!(sharding.tokens_on(rank, length), counted, "{sharding:?} {rank} {length}");
                }
                let empty = (0..dcp).any(|rank| sharding.tokens_on(rank, length) == 0);
                assert_eq!(empty, length < sharding.shortest_without_empty_shard());
            }
        }
    }

    #[test]
    fn a_gsm8k_run_never_holds_more_than_232_tokens_on_a_rank_of_eight() {
        let reach = Reach::of(&[answer(610, 40), answer(1597, 256)], Some(SHARDING)).unwrap();
        assert_eq!((reach.shortest_prompt, reach.longest_sequence), (610, 1853));
        let shards = reach.shards.unwrap();
        assert_eq!(shards.most_on_a_rank, 232);
        assert_eq!((shards.with_empty_shard, shards.residues_seen), (0, 8));
        assert_eq!(shards.virtual_blocks, Some(15));
        // 610 + 1..=610 + 39: positions 610..=648 cross 640 = 5·128; the long one crosses as well
        assert_eq!(shards.crossed_virtual_block, Some(2));
        // with an interleave of 64 the shortest prompt still fills all eight ranks
        let wide = Sharding { interleave: 64, ..SHARDING };
        let reach = Reach::of(&[answer(610, 40), answer(1597, 256)], Some(wide)).unwrap();
        assert_eq!(reach.shards.unwrap().with_empty_shard, 0);
    }

    #[test]
    fn short_prompts_reach_empty_shards_and_single_tokens_decode_nothing() {
        let wide = Sharding { dcp: 8, interleave: 64, block_size: None };
        let shards = Reach::of(&[answer(100, 5), answer(2000, 1)], Some(wide)).unwrap().shards.unwrap();
        assert_eq!((shards.with_empty_shard, shards.fewest_on_a_rank), (1, 0));
        assert_eq!((shards.residues_seen, shards.virtual_blocks), (4, None));
        let mut uncounted = answer(1, 1);
        uncounted.prompt_tokens = None;
        assert_eq!(Reach::of(&[uncounted], None), None);
    }
}
