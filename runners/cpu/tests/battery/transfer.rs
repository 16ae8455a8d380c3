//! Requests that come with the caches of a session of another layout.

use shardcheck_cpu::CpuEngine;
use shardcheck_engine::{CacheLayout, EngineError, Mask, Operation, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::scene::{Scene, step, uniform};

/// Tokens of the two requests that come.
const LENS: [i32; 2] = [13, 3];
/// Blocks that they have in the source, of eight tokens over two ranks, and here, of twelve over three.
const SOURCE_TABLE: [i32; 4] = [4, 1, 2, -7];
const TABLE: [i32; 4] = [6, 3, 1, 9999];

/// The caches behind the import, and a decode over them.
pub fn play(engine: &CpuEngine) -> [Result<Reply, EngineError>; 2] {
    let scene = Scene::small(3);
    let (dim, heads) = (scene.configuration.attention.qk_dim(), scene.configuration.total_heads());
    let mut session = scene.open(engine);
    let source = CacheLayout { dcp: 2, interleave: 2, block_size: 4 };
    // every slot of the source holds something, also those that hold none of the tokens
    let cache = uniform(31, 2 * 5 * 4 * dim);
    let lens = Tensor::from_i32(&[2], &LENS);
    let table = Tensor::from_i32(&[2, 2], &TABLE);
    let mut given = Tensors::new()
        .with("source_key_cache", Tensor::from_f32(Dtype::Bf16, &[2, 5, 4, 1, dim], &cache))
        .with("source_block_table", Tensor::from_i32(&[2, 2], &SOURCE_TABLE))
        .with("seq_lens", lens.clone())
        .with("block_table", table.clone());
    let imported = step(session.as_mut(), &Operation::ImportCache { source }, &mut given);
    let caches = imported.and_then(|_| step(session.as_mut(), &Operation::ReadCache, &mut Tensors::new()));
    let mut attend = Tensors::new()
        .with("seq_lens", lens)
        .with("query_start_loc", Tensor::from_i32(&[3], &[0, 1, 2]))
        .with("block_table", table)
        .with("query", Tensor::from_f32(Dtype::Bf16, &[2, heads, dim], &uniform(32, 2 * heads * dim)));
    let decode = step(session.as_mut(), &Operation::Attend { mask: Mask::Causal }, &mut attend);
    [caches, decode]
}
