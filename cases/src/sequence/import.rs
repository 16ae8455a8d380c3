//! The caches that requests bring along from a session of another layout.

use shardcheck_engine::{CacheLayout, Configuration, Conventions, Tensor, Tensors};

use super::SequenceCase;
use super::content::{table, token_row};
use crate::inputs::blocks::place;
use crate::inputs::cache_code;
use crate::inputs::draw::Draw;
use crate::stream::Stream;

/// Bytes of every slot that holds none of the tokens: a finite number in each cache format, so that one that is taken over by
/// mistake is neither what was there before nor a NaN.
const FILLER: u8 = 0x2A;
/// Blocks of a source that hold nothing.
const SPARE_BLOCKS: usize = 2;
/// Most ranks and most tokens of a block of a source.
const MAX_SOURCE: usize = 256;

/// Requests that come from a session of another layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// Index of the step among all steps of the sequence.
    pub step: usize,
    /// Number of each request.
    pub requests: Vec<usize>,
    /// Tokens of each request.
    pub tokens: Vec<Vec<u32>>,
    /// Blocks of each request in the session that takes them.
    pub blocks: Vec<Vec<i32>>,
    /// Layout of the session that they come from.
    pub source: CacheLayout,
}

/// Refuses a layout that no session can have.
pub(super) fn check_source(source: &CacheLayout) -> Result<(), String> {
    let CacheLayout { dcp, interleave, block_size } = *source;
    if [dcp, interleave, block_size].iter().any(|size| *size == 0 || *size > MAX_SOURCE) {
        return Err(format!("sizes of the source must be between 1 and {MAX_SOURCE}"));
    }
    if !block_size.is_multiple_of(interleave) {
        return Err(format!(
            "interleave {interleave} of the source does not divide its block size {block_size}"
        ));
    }
    Ok(())
}

impl Import {
    /// The configuration of the session that the requests come from, as far as its caches go.
    fn configuration(&self, sequence: &SequenceCase) -> Configuration {
        let CacheLayout { dcp, interleave, block_size } = self.source;
        let mut configuration =
            Configuration { dcp, interleave, block_size, ..sequence.configuration.clone() };
        let virtual_block = configuration.virtual_block_tokens();
        let needed: usize = self.tokens.iter().map(|tokens| tokens.len().div_ceil(virtual_block)).sum();
        configuration.blocks = needed + SPARE_BLOCKS;
        configuration
    }

    /// Codes of the tokens of all requests, one behind the other, by cache: `[tokens, elements]`.
    pub fn codes(
        &self,
        sequence: &SequenceCase,
        seed: u64,
        conventions: &Conventions,
    ) -> Vec<(&'static str, Vec<Vec<u64>>)> {
        let (configuration, draw) = (&sequence.configuration, Draw::new(seed));
        let attention = configuration.attention;
        let of = |stream: Stream, width: usize| -> Vec<Vec<u64>> {
            let elements = attention.kv_heads() * width;
            let row = |token: &u32| token_row(configuration, &draw, stream, *token, elements);
            let code = |value: f32| cache_code(configuration, conventions, value);
            self.tokens.iter().flatten().map(|token| row(token).into_iter().map(code).collect()).collect()
        };
        let mut codes = vec![("key_cache", of(Stream::Key, attention.qk_dim()))];
        if !attention.is_mla() {
            codes.push(("value_cache", of(Stream::Value, attention.value_dim())));
        }
        codes
    }

    /// Inputs of [`shardcheck_engine::Operation::ImportCache`].
    pub fn inputs(&self, sequence: &SequenceCase, seed: u64, conventions: &Conventions) -> Tensors {
        let source = self.configuration(sequence);
        let blocks = self.source_blocks(&source, seed);
        let lens: Vec<i32> = self.tokens.iter().map(|tokens| tokens.len() as i32).collect();
        let table_of = |blocks: &[Vec<i32>], cache_blocks: usize| {
            let (table, width) = table(blocks, cache_blocks);
            Tensor::from_i32(&[blocks.len(), width], &table)
        };
        let mut tensors = Tensors::new()
            .with("source_block_table", table_of(&blocks, source.blocks))
            .with("seq_lens", Tensor::from_i32(&[lens.len()], &lens))
            .with("block_table", table_of(&self.blocks, sequence.configuration.blocks));
        for (name, codes) in self.codes(sequence, seed, conventions) {
            let name = if name == "key_cache" { "source_key_cache" } else { "source_value_cache" };
            tensors.insert(name, self.cache(&source, &blocks, &codes));
        }
        tensors
    }

    /// Blocks of each request in the source, in no order.
    fn source_blocks(&self, source: &Configuration, seed: u64) -> Vec<Vec<i32>> {
        let mut free: Vec<i32> = (0..source.blocks as i32).collect();
        let mut counter = Stream::SourceBlocks.counter(seed ^ self.step as u64);
        for last in (1..free.len()).rev() {
            free.swap(last, counter.below(last as u64 + 1) as usize);
        }
        let mut free = free.into_iter();
        let needed = |tokens: &Vec<u32>| tokens.len().div_ceil(source.virtual_block_tokens());
        self.tokens.iter().map(|tokens| free.by_ref().take(needed(tokens)).collect()).collect()
    }

    /// The cache of all ranks of the source with the tokens in their slots.
    fn cache(&self, source: &Configuration, blocks: &[Vec<i32>], codes: &[Vec<u64>]) -> Tensor {
        let attention = source.attention;
        let (dtype, elements) = (source.kv_dtype, codes.first().map_or(0, Vec::len));
        let (size, heads) = (dtype.size_bytes(), attention.kv_heads());
        let shape = vec![source.dcp, source.blocks, source.block_size, heads, elements / heads];
        let mut bytes = vec![FILLER; shape.iter().product::<usize>() * size];
        let mut codes = codes.iter();
        for (request, tokens) in self.tokens.iter().enumerate() {
            for (position, row) in (0..tokens.len()).zip(codes.by_ref()) {
                let place = place(source, position);
                let block = place.owner * source.blocks + blocks[request][place.entry] as usize;
                let start = (block * source.block_size + place.offset) * elements * size;
                let row = row.iter().flat_map(|code| code.to_le_bytes().into_iter().take(size));
                bytes[start..].iter_mut().zip(row).for_each(|(byte, code)| *byte = code);
            }
        }
        Tensor::new(dtype, shape, bytes).expect("the bytes were made for this shape")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case, turns};

    fn conventions() -> Conventions {
        Conventions {
            lse_base: shardcheck_engine::LseBase::E,
            empty_partial: shardcheck_engine::EmptyPartial::Undefined,
            lane_orders: Vec::new(),
            scale_rounding: shardcheck_engine::ScaleRounding::Reciprocal,
            overflow: shardcheck_formats::Overflow::Saturate,
            new_tokens: shardcheck_engine::NewTokens::OnRanks,
        }
    }

    #[test]
    fn a_source_holds_each_token_once_and_filler_elsewhere() {
        // W = 2, S = 2, B = 2: positions 0, 1 on rank 0 and 2, 3 on rank 1 of the first block, 4 on rank 0 of the second
        let id = "sequence/tiny-gqa/tp3.dcp3.h1.s1.b4.e4m3fn@0.5.ag_rs/import/i0+5,1+1.w2.s2.b2_d0,1/7";
        let case: Case = id.parse().unwrap();
        let Body::Sequence(body) = &case.body else { panic!("a sequence") };
        let import = turns(body, 7).unwrap().remove(0).imports.remove(0);
        let inputs = import.inputs(body, 7, &conventions());
        let table = inputs.get("source_block_table").unwrap().to_i64();
        let cache = inputs.get("source_key_cache").unwrap();
        let elements = body.configuration.attention.qk_dim() * body.configuration.attention.kv_heads();
        assert_eq!(cache.shape()[..3], [2, 5, 2]);
        let codes = import.codes(body, 7, &conventions()).remove(0).1;
        let width = table.len() / 2;
        let mut held = Vec::new();
        for (token, (request, rank, entry, offset)) in
            [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1), (0, 0, 1, 0), (1, 0, 0, 0)]
                .into_iter()
                .enumerate()
        {
            let slot = (rank * 5 + table[request * width + entry] as usize) * 2 + offset;
            assert_eq!(cache.to_codes()[slot * elements..][..elements], codes[token], "token {token}");
            held.push(slot);
        }
        for (slot, row) in cache.to_codes().chunks_exact(elements).enumerate() {
            assert!(held.contains(&slot) || row.iter().all(|code| *code == u64::from(FILLER)), "slot {slot}");
        }
        assert_eq!(case.id().parse::<Case>().unwrap(), case);
    }
}
