//! Prefill context parallelism: a batch shared out over ranks of its own, by kernels; the host checks the batch and makes room.

use std::sync::Arc;

use shardcheck_engine::{EngineError, PcpDecodes, PcpStrategy, Reply, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{bytes_of, contiguous, crash};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::router::word;
use crate::states::whole;

/// Most ranks that a batch is shared out over.
const MAX_RANKS: usize = 4096;

/// `Split` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct SplitShape {
    pub world: i32,
    pub strategy: i32,
    pub decodes: i32,
    pub least: i32,
    pub requests: i32,
    pub rows: i32,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Split {
    /// Ranks.
    pub world: usize,
    /// Which rows of a prompt a rank takes.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do.
    pub decodes: PcpDecodes,
    /// Rows that a rank runs at least.
    pub padded_rows: usize,
}

/// A batch on the host.
struct Batch {
    starts: Vec<i32>,
    computed: Vec<i32>,
    prefills: Vec<u8>,
}

impl Batch {
    fn read(inputs: &Tensors) -> Result<Self, EngineError> {
        let count = inputs.get("context_lens")?.len();
        let read = |name: &str, length: usize| -> Result<Vec<i32>, EngineError> {
            let values = inputs.get(name)?.expect(name, Dtype::I32, &[length])?.to_i64();
            Ok(values.into_iter().map(|value| value as i32).collect())
        };
        let (starts, computed) = (read("query_start_loc", count + 1)?, read("context_lens", count)?);
        let prefills = contiguous(inputs, "is_prefilling", Dtype::U8, &[count])?;
        if starts[0] != 0 || !starts.is_sorted() {
            return Err(crash("query_start_loc does not start at 0 and rise"));
        }
        if computed.iter().any(|tokens| *tokens < 0) {
            return Err(crash("context_lens holds a negative length"));
        }
        Ok(Self { starts, computed, prefills })
    }

    /// What the kernels are told of it, the split being one that has ranks and not too many.
    fn shape(&self, split: &Split) -> Result<SplitShape, EngineError> {
        if split.world == 0 || split.world > MAX_RANKS {
            return Err(crash(format!("{} ranks", split.world)));
        }
        let requests = self.computed.len();
        let rows = self.starts[requests];
        // a gathered row is counted in 32 bits, and a chunk that a defect does not clamp as well
        let chunks = rows as usize + 2 * split.world;
        word("gathered rows", split.world * chunks.max(split.padded_rows))?;
        Ok(SplitShape {
            world: split.world as i32,
            strategy: match split.strategy {
                PcpStrategy::HeadTail => 0,
                PcpStrategy::HeadTailOrWhole => 1,
                PcpStrategy::Zigzag => 2,
                PcpStrategy::RoundRobin => 3,
                PcpStrategy::Contiguous => 4,
            },
            decodes: match split.decodes {
                PcpDecodes::Split => 0,
                PcpDecodes::Replicated => 1,
                PcpDecodes::Owned => 2,
            },
            least: split.padded_rows as i32,
            requests: requests as i32,
            rows,
        })
    }
}

/// Shares a batch out.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for starts that fall.
pub fn share_out(queue: &Arc<Queue>, inputs: &Tensors, split: &Split) -> Result<Reply, EngineError> {
    let batch = Batch::read(inputs)?;
    let shape = batch.shape(split)?;
    let (world, rows) = (split.world, shape.rows as usize);
    let words = [Argument::Split(shape)];
    let starts = queue.upload(&bytes_of(&batch.starts))?;
    let computed = queue.upload(&bytes_of(&batch.computed))?;
    let prefills = queue.upload(&batch.prefills)?;
    let (counts, widest) = (queue.unwritten(4 * world)?, queue.unwritten(4)?);
    let launch = |kernel: &str, elements: usize, arguments: &[Argument]| {
        queue.launch(kernel, Extent::over(elements), &[&words[..], arguments].concat())
    };
    launch("share_counts", world, &[starts.argument(), prefills.argument(), counts.argument()])?;
    launch("share_width", 1, &[counts.argument(), widest.argument()])?;
    let width = queue.read(&widest, 4)?;
    let width = i32::from_le_bytes([width[0], width[1], width[2], width[3]]);
    let padded = usize::try_from(width).map_err(|_| crash("a rank runs fewer than no rows"))?;
    let (total, width) = (world * padded, Argument::Int(width));
    let made: Vec<Buffer> =
        [8, 8, 4, 4, 1].iter().map(|size| queue.unwritten(size * total)).collect::<Result<_, _>>()?;
    let [own, positions, bounds, gathered, writes] = &made[..] else { unreachable!("five were made") };
    let given = [starts.argument(), computed.argument(), prefills.argument(), width];
    let made: Vec<Argument> = made.iter().map(Buffer::argument).collect();
    launch("share_rows", total, &[&given[..], &made].concat())?;
    let latest = queue.allocate(4 * rows)?;
    queue.fill(&latest, 0)?;
    launch("place_rows", total, &[counts.argument(), gathered.argument(), width, latest.argument()])?;
    let (restore, writer) = (queue.unwritten(8 * world * rows)?, queue.unwritten(world * total)?);
    let arguments = [gathered.argument(), width, latest.argument(), restore.argument()];
    launch("restore_rows", world * rows, &arguments)?;
    launch("repeat_writers", world * total, &[writes.argument(), width, writer.argument()])?;
    let outputs = Tensors::new()
        .with("rows", whole(queue, own, Dtype::I64, &[world, padded])?)
        .with("positions", whole(queue, positions, Dtype::I64, &[world, padded])?)
        .with("row_lens", whole(queue, bounds, Dtype::I32, &[world, padded])?)
        .with("restore", whole(queue, &restore, Dtype::I64, &[world, rows])?)
        .with("kv_writer", whole(queue, &writer, Dtype::U8, &[world, total])?);
    Ok(Reply { outputs, collectives: vec![0; world], ..Reply::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(starts: &[i32]) -> Batch {
        let requests = starts.len() - 1;
        Batch { starts: starts.to_vec(), computed: vec![0; requests], prefills: vec![1; requests] }
    }

    const SPLIT: Split =
        Split { world: 4, strategy: PcpStrategy::Contiguous, decodes: PcpDecodes::Owned, padded_rows: 3 };

    #[test]
    fn the_shape_is_as_long_as_the_six_words_of_the_kernels() {
        assert_eq!(size_of::<SplitShape>(), 6 * 4);
        let shape = batch(&[0, 4, 9]).shape(&SPLIT).unwrap();
        assert_eq!((shape.world, shape.strategy, shape.decodes), (4, 4, 2));
        assert_eq!((shape.least, shape.requests, shape.rows), (3, 2, 9));
    }

    #[test]
    fn no_ranks_too_many_and_more_rows_than_are_counted_are_refused() {
        for split in [
            Split { world: 0, ..SPLIT },
            Split { world: MAX_RANKS + 1, ..SPLIT },
            Split { padded_rows: 1 << 31, ..SPLIT },
        ] {
            assert!(matches!(batch(&[0, 4]).shape(&split), Err(EngineError::Crash { .. })), "{split:?}");
        }
        assert!(batch(&[0, i32::MAX]).shape(&SPLIT).is_err());
    }
}
