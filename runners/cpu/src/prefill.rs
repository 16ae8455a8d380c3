//! Prefill context parallelism: which rows of a batch each rank runs, what they see, and how they come back.
//!
//! Formulas: vLLM `PCPManager` (chunks from both ends, decodes on every rank or on one), ATOM `pcp_utils` (round robin over the
//! flattened batch), SGLang `--cp-strategy` (zigzag).

pub mod attention;
pub mod compressing;
pub mod indexing;

use std::ops::Range;

use shardcheck_engine::{EngineError, PcpDecodes, PcpStrategy, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

/// Most ranks that a batch is shared out over.
const MAX_RANKS: usize = 4096;

/// One rank's share, as later steps take it: see [`PrefillPolicies::restore`].
#[derive(Debug, Clone)]
pub struct Shares {
    /// Row of the batch of each gathered row, rank after rank, `None` for padding.
    pub gathered: Vec<Option<usize>>,
    /// Rows of each rank without padding.
    pub counts: Vec<usize>,
    /// Rows of each rank with padding.
    pub padded: usize,
    /// Rows of the batch.
    pub rows: usize,
}

/// How a batch is shared out.
#[derive(Clone, Copy, PartialEq)]
pub struct PrefillPolicies {
    /// Whether a request's rows are shared out as a prompt's: `(it prefills, rows)`.
    pub is_prompt: fn(bool, usize) -> bool,
    /// Requests of the first of two groups that overlap: `(first row of each request and the number of rows, ranks)`.
    pub first_group: fn(&[usize], usize) -> usize,
    /// Rank at which the rows of a group begin to go round: `(first row of the group, ranks)`.
    pub phase: fn(usize, usize) -> usize,
    /// Rows of a chunk: `(rows of the sequence, chunks)`.
    pub chunk_rows: fn(usize, usize) -> usize,
    /// Rows of chunk `index` of a sequence: `(index, rows of a chunk, rows of the sequence)`.
    pub chunk: fn(usize, usize, usize) -> Range<usize>,
    /// The chunk from the end that goes with a rank's chunk from the front: `(rank, ranks)`.
    pub tail: fn(usize, usize) -> usize,
    /// Rows of a rank in a round robin: `(rank, ranks, first row of each request and the number of rows)`.
    pub striped: fn(usize, usize, &[usize]) -> Vec<usize>,
    /// Rank that has a decode to itself: `(its place among decodes with rows, its place in the batch, ranks)`.
    pub owner: fn(usize, usize, usize) -> usize,
    /// The order in which the rows of a tail chunk are run.
    pub tail_order: fn(&mut Vec<usize>),
    /// Rows of a rank with padding: `(rows of each rank, rows asked for)`.
    pub padded: fn(&[usize], usize) -> usize,
    /// What stands for a padding row.
    pub padding: i64,
    /// Position of a row: `(tokens computed before, place among the new rows, place in the chunk)`.
    pub position: fn(usize, usize, usize) -> usize,
    /// Tokens that a row sees: `(its position, its place in the chunk)`.
    pub bound: fn(usize, usize) -> usize,
    /// Place of every row of the batch among the gathered ones.
    pub restore: fn(&Shares) -> Vec<i64>,
    /// Whether the copy on a rank writes the KV of a row that every rank has.
    pub writes: fn(usize) -> bool,
}

impl PrefillPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        is_prompt: |prefills, _| prefills,
        first_group,
        phase: |_, _| 0,
        chunk_rows: |rows, chunks| rows.div_ceil(chunks),
        chunk,
        tail: |rank, ranks| 2 * ranks - 1 - rank,
        striped: |rank, ranks, starts| (rank..starts.last().copied().unwrap_or(0)).step_by(ranks).collect(),
        owner: |decode, _, ranks| decode % ranks,
        tail_order: |_| {},
        padded: |counts, asked| counts.iter().copied().max().unwrap_or(0).max(asked),
        padding: -1,
        position: |computed, row, _| computed + row,
        bound: |position, _| position + 1,
        restore,
        writes: |rank| rank == 0,
    };
}

/// The fewest requests that reach half of the rows; all of them where there is nothing to divide.
pub fn first_group(starts: &[usize], ranks: usize) -> usize {
    let (requests, rows) = (starts.len() - 1, starts[starts.len() - 1]);
    if requests < 2 || rows / ranks < 2 {
        return requests;
    }
    balanced(starts).clamp(1, requests - 1)
}

/// Requests that have at least half of the rows, rounded down.
pub fn balanced(starts: &[usize]) -> usize {
    let half = starts[starts.len() - 1] / 2;
    starts[1..].partition_point(|end| *end < half) + 1
}

/// Chunk `index`; a short one at the end, none behind it.
pub fn chunk(index: usize, chunk_rows: usize, rows: usize) -> Range<usize> {
    let first = (index * chunk_rows).min(rows);
    first..(first + chunk_rows).min(rows)
}

/// The first copy of a row is as good as any other.
pub fn restore(shares: &Shares) -> Vec<i64> {
    let mut places = vec![-1; shares.rows];
    for (place, row) in shares.gathered.iter().enumerate().rev() {
        // a row behind the end of the batch is nobody's
        if let Some(known) = row.and_then(|row| places.get_mut(row)) {
            *known = place as i64;
        }
    }
    places
}

/// What is asked for: ranks, strategy, decodes, rows of a rank at least.
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
    /// Whether there are two groups that overlap.
    pub overlap: bool,
}

/// A batch as it is given.
pub struct Batch {
    /// First row of each request, then the number of rows.
    pub starts: Vec<usize>,
    /// Tokens of each request that were computed before.
    pub computed: Vec<usize>,
    prefills: Vec<bool>,
}

impl Batch {
    fn read(inputs: &Tensors) -> Result<Self, EngineError> {
        let crash = |text: &str| EngineError::Crash { text: text.to_owned() };
        let count = inputs.get("context_lens")?.len();
        let starts = inputs.get("query_start_loc")?.expect("query_start_loc", Dtype::I32, &[count + 1])?;
        let computed = inputs.get("context_lens")?.expect("context_lens", Dtype::I32, &[count])?;
        let prefills = inputs.get("is_prefilling")?.expect("is_prefilling", Dtype::U8, &[count])?;
        let whole = |tensor: &Tensor| {
            let values = tensor.to_i64().into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
            values.map_err(|_| crash("a length or a start is negative"))
        };
        let (starts, computed) = (whole(starts)?, whole(computed)?);
        if starts[0] != 0 || !starts.is_sorted() {
            return Err(crash("query_start_loc does not start at 0 and rise"));
        }
        Ok(Self { starts, computed, prefills: prefills.to_i64().iter().map(|flag| *flag != 0).collect() })
    }

    /// Some of the requests as a batch of their own.
    fn part(&self, requests: Range<usize>) -> Self {
        let first = self.starts[requests.start];
        let starts = &self.starts[requests.start..=requests.end];
        Self {
            starts: starts.iter().map(|start| start - first).collect(),
            computed: self.computed[requests.clone()].to_vec(),
            prefills: self.prefills[requests].to_vec(),
        }
    }

    /// Rows of all requests.
    pub fn rows(&self) -> usize {
        self.starts[self.computed.len()]
    }

    /// Request of a row; the last one behind the end.
    pub fn request_of(&self, row: usize) -> usize {
        let behind = self.starts.partition_point(|start| *start <= row);
        behind.clamp(1, self.computed.len()) - 1
    }
}

/// A local row.
#[derive(Clone, Copy)]
pub struct Local {
    /// Its row of the batch.
    pub row: usize,
    /// Its place in the chunk.
    pub in_chunk: usize,
    /// Its chunk, of those of the rank: rows of one chunk are attended together.
    pub chunk: usize,
    /// Whether every rank has it.
    pub everywhere: bool,
}

/// A batch that is shared out.
pub struct Shared {
    /// The batch.
    pub batch: Batch,
    /// Rows of each rank, without padding.
    pub locals: Vec<Vec<Local>>,
    /// Rows that a rank runs, padding included.
    pub padded: usize,
}

impl Shared {
    /// Shares a batch out.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit; a crash for starts that fall, and for no ranks or too many.
    pub fn of(inputs: &Tensors, split: Split, policies: &PrefillPolicies) -> Result<Self, EngineError> {
        let batch = Batch::read(inputs)?;
        split.check()?;
        Ok(Self::group(batch, 0, split, policies))
    }

    /// Shares out a group whose first row is row `first` of the whole batch.
    fn group(batch: Batch, first: usize, split: Split, policies: &PrefillPolicies) -> Self {
        let world = split.world;
        let phase = (policies.phase)(first, world) % world;
        let of_rank = |rank: usize| local_rows(&batch, (rank + world - phase) % world, split, policies);
        let locals: Vec<Vec<Local>> = (0..world).map(of_rank).collect();
        let counts: Vec<usize> = locals.iter().map(Vec::len).collect();
        let padded = (policies.padded)(&counts, split.padded_rows);
        Self { batch, locals, padded }
    }

    /// The rows that a rank runs, padding left out.
    pub fn run_by(&self, rank: usize) -> &[Local] {
        let own = &self.locals[rank];
        &own[..own.len().min(self.padded)]
    }

    /// What later steps take of it.
    pub fn shares(&self) -> Shares {
        let mut gathered = vec![None; self.locals.len() * self.padded];
        for rank in 0..self.locals.len() {
            for (place, local) in self.run_by(rank).iter().enumerate() {
                gathered[rank * self.padded + place] = Some(local.row);
            }
        }
        let counts = self.locals.iter().map(Vec::len).collect();
        Shares { gathered, counts, padded: self.padded, rows: self.batch.rows() }
    }
}

impl Split {
    fn check(self) -> Result<(), EngineError> {
        if self.world == 0 || self.world > MAX_RANKS {
            return Err(EngineError::Crash { text: format!("{} ranks", self.world) });
        }
        Ok(())
    }
}

/// Shares a batch out, in one piece or in two groups.
///
/// # Errors
/// As [`Shared::of`].
pub fn share_out(inputs: &Tensors, split: Split, policies: &PrefillPolicies) -> Result<Reply, EngineError> {
    let batch = Batch::read(inputs)?;
    split.check()?;
    let (world, requests) = (split.world, batch.computed.len());
    let boundary = if split.overlap { (policies.first_group)(&batch.starts, world) } else { requests };
    let mut parts = Vec::new();
    for part in [0..boundary, boundary..requests].into_iter().filter(|part| !part.is_empty()) {
        let first = batch.starts[part.start];
        parts.push((first, Shared::group(batch.part(part), first, split, policies)));
    }
    let padded: usize = parts.iter().map(|(_, part)| part.padded).sum();
    let mut shared = Placement::default();
    for rank in 0..world {
        for (first, part) in &parts {
            shared.push_rank(part, rank, *first, policies);
        }
    }
    // gathered rows are those of a rank, group after group; a group brings its own back
    let (mut restore, mut before) = (Vec::new(), 0);
    for (_, part) in &parts {
        let place = |place: i64| match usize::try_from(place) {
            Ok(place) => {
                let own = part.padded.max(1);
                (place / own * padded + before + place % own) as i64
            }
            Err(_) => place,
        };
        restore.extend((policies.restore)(&part.shares()).into_iter().map(place));
        before += part.padded;
    }
    let rows = restore.len();
    let mut outputs = Tensors::new()
        .with("rows", Tensor::from_i64(&[world, padded], &shared.rows))
        .with("positions", Tensor::from_i64(&[world, padded], &shared.positions))
        .with("row_lens", Tensor::from_i32(&[world, padded], &shared.bounds))
        .with("restore", Tensor::from_i64(&[world, rows], &restore.repeat(world)))
        .with(
            "kv_writer",
            Tensor::from_codes(Dtype::U8, &[world, world * padded], &shared.writer.repeat(world)),
        );
    if split.overlap {
        let groups = [boundary as i32, (requests - boundary) as i32].repeat(world);
        outputs.insert("groups", Tensor::from_i32(&[world, 2], &groups));
    }
    Ok(Reply { outputs, collectives: vec![0; world], ..Reply::default() })
}

/// What is derived for the rows of all ranks, padding included.
#[derive(Default)]
struct Placement {
    rows: Vec<i64>,
    positions: Vec<i64>,
    bounds: Vec<i32>,
    writer: Vec<u64>,
}

impl Placement {
    /// Appends the rows of a rank in a group whose first row is row `first` of the batch.
    fn push_rank(&mut self, part: &Shared, rank: usize, first: usize, policies: &PrefillPolicies) {
        let batch = &part.batch;
        for place in 0..part.padded {
            let Some(local) = part.locals[rank].get(place) else {
                self.rows.push(policies.padding);
                self.positions.push(0);
                self.bounds.push(0);
                self.writer.push(0);
                continue;
            };
            let request = batch.request_of(local.row);
            let in_request = local.row - batch.starts[request];
            let position = (policies.position)(batch.computed[request], in_request, local.in_chunk);
            self.rows.push((first + local.row) as i64);
            self.positions.push(position as i64);
            self.bounds.push((policies.bound)(position, local.in_chunk) as i32);
            self.writer.push(u64::from(!local.everywhere || (policies.writes)(rank)));
        }
    }
}

fn local_rows(batch: &Batch, rank: usize, split: Split, policies: &PrefillPolicies) -> Vec<Local> {
    let (mut own, mut chunks_of_rank) = (Vec::new(), 0);
    let mut add = |rows: Vec<usize>, everywhere: bool| {
        let chunk = chunks_of_rank;
        chunks_of_rank += 1;
        let local = |(in_chunk, row)| Local { row, in_chunk, chunk, everywhere };
        own.extend(rows.into_iter().enumerate().map(local));
    };
    if split.strategy == PcpStrategy::RoundRobin {
        add((policies.striped)(rank, split.world, &batch.starts), false);
        return own;
    }
    let mut decode = 0;
    for (request, prefills) in batch.prefills.iter().enumerate() {
        let (first, count) = (batch.starts[request], batch.starts[request + 1] - batch.starts[request]);
        let whole = || (first..first + count).collect::<Vec<_>>();
        if !(policies.is_prompt)(*prefills, count) && split.decodes != PcpDecodes::Split {
            let replicated = split.decodes == PcpDecodes::Replicated;
            if replicated || (policies.owner)(decode, request, split.world) == rank {
                add(whole(), replicated);
            }
            decode += usize::from(count > 0);
            continue;
        }
        let chunks = chunks_of(split, rank, count, policies);
        let Some(chunks) = chunks else {
            add(whole(), true);
            continue;
        };
        for (index, rows) in chunks.into_iter().enumerate() {
            let mut rows: Vec<usize> = rows.map(|row| first + row).collect();
            if index == 1 {
                (policies.tail_order)(&mut rows);
            }
            add(rows, false);
        }
    }
    own
}

/// Chunks of a prompt of `count` rows that a rank runs; `None` where every rank runs the whole of it.
fn chunks_of(
    split: Split,
    rank: usize,
    count: usize,
    policies: &PrefillPolicies,
) -> Option<Vec<Range<usize>>> {
    let (world, doubled) = (split.world, 2 * split.world);
    let own = [rank, (policies.tail)(rank, world)];
    let size = (policies.chunk_rows)(count, doubled);
    Some(match split.strategy {
        PcpStrategy::HeadTailOrWhole if (doubled - 1) * size >= count => return None,
        PcpStrategy::Contiguous => {
            vec![(policies.chunk)(rank, (policies.chunk_rows)(count, world), count)]
        }
        PcpStrategy::Zigzag => {
            // block i begins behind i short blocks and the rows that the longer ones among them have more
            let first = |index: usize| index * (count / doubled) + index.min(count % doubled);
            own.map(|index| first(index)..first(index + 1)).to_vec()
        }
        _ => own.map(|index| (policies.chunk)(index, size, count)).to_vec(),
    })
}
