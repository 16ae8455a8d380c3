//! Prefill context parallelism: which rank has which row of a batch, row by row.
//!
//! Rows are those of the flattened batch, the requests' new tokens one request after the other. The rules are the published
//! ones of ATOM (`pcp_utils`), SGLang (`--cp-strategy`) and vLLM (`PCPManager`), each as a formula for a single row.

/// Which rows of a prompt a rank takes; `P` ranks, `q` new rows of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// 2P chunks of ceil(q / 2P) rows; rank r has chunks r and 2P − 1 − r (vLLM DualChunkSwap).
    HeadTail,
    /// The same, but a sequence that leaves one of its chunks empty is whole on every rank (vLLM with DCP inside PCP).
    HeadTailOrWhole,
    /// 2P blocks, the first q mod 2P of them one row longer; rank r has blocks r and 2P − 1 − r (SGLang zigzag).
    Zigzag,
    /// Row i of the flattened batch is on rank i mod P (ATOM, SGLang round robin).
    RoundRobin,
    /// P chunks of ceil(q / P) rows; rank r has chunk r.
    Contiguous,
}

/// What the rows of decodes do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decodes {
    /// They follow the strategy like any other row.
    Split,
    /// They are on every rank.
    Replicated,
    /// The d-th decode with rows, from 0, is on rank d mod P.
    Owned,
}

/// One request of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Tokens computed before.
    pub context_tokens: usize,
    /// New rows q.
    pub rows: usize,
    /// Whether its rows are a prompt's.
    pub is_prefilling: bool,
}

/// Where a row of the batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Request of the row.
    pub request: usize,
    /// Position in the request: tokens computed before plus the row's place among the new ones.
    pub position: usize,
    /// The rank that has the row; `None`: every rank.
    pub owner: Option<usize>,
    /// Which run of its rank the row lies in: rows of one run are neighbours on a rank, in ascending order.
    pub run: usize,
}

impl Placed {
    /// Whether a rank has the row.
    pub fn is_on(&self, rank: usize) -> bool {
        self.owner.is_none_or(|owner| owner == rank)
    }

    /// Tokens that the row sees under a causal mask: global positions, whatever the rank.
    pub fn visible_tokens(&self) -> usize {
        self.position + 1
    }
}

/// Places every row of a batch over `world` ranks.
///
/// # Panics
/// When `world` is 0.
pub fn place(world: usize, strategy: Strategy, decodes: Decodes, batch: &[Sequence]) -> Vec<Placed> {
    assert!(world > 0, "there is no rank");
    let (mut placed, mut decode, mut runs) = (Vec::new(), 0, 0);
    for (request, sequence) in batch.iter().enumerate() {
        let follows = sequence.is_prefilling || decodes == Decodes::Split;
        for row in 0..sequence.rows {
            let (owner, part) = match decodes {
                Decodes::Replicated if !follows => (None, 0),
                Decodes::Owned if !follows => (Some(decode % world), 0),
                _ => of_prompt(world, strategy, placed.len(), row, sequence.rows),
            };
            // a round robin knows no sequences: all rows of a rank are one run
            let run = if follows && strategy == Strategy::RoundRobin { 0 } else { runs + part };
            placed.push(Placed { request, position: sequence.context_tokens + row, owner, run });
        }
        decode += usize::from(!sequence.is_prefilling && sequence.rows > 0);
        runs += 2 * world;
    }
    placed
}

/// Owner and part of row `row` of a prompt's `rows`, whose place in the flattened batch is `flat`.
fn of_prompt(
    world: usize,
    strategy: Strategy,
    flat: usize,
    row: usize,
    rows: usize,
) -> (Option<usize>, usize) {
    let parts = 2 * world;
    let mirrored = |part: usize| (Some(part.min(parts - 1 - part)), part);
    match strategy {
        Strategy::HeadTail => mirrored(row / rows.div_ceil(parts)),
        Strategy::HeadTailOrWhole => {
            let chunk = rows.div_ceil(parts);
            // the last chunk begins at or behind the end
            if (parts - 1) * chunk >= rows { (None, 0) } else { mirrored(row / chunk) }
        }
        Strategy::Zigzag => {
            let (short, longer) = (rows / parts, rows % parts);
            let of_longer = longer * (short + 1);
            mirrored(if row < of_longer { row / (short + 1) } else { longer + (row - of_longer) / short })
        }
        Strategy::RoundRobin => (Some(flat % world), 0),
        Strategy::Contiguous => {
            let part = row / rows.div_ceil(world);
            (Some(part), part)
        }
    }
}

/// Requests of the first of two groups that overlap: the fewest that have half of the rows, rounded down, at least one and all but one at
/// most; all of them where the batch is not divided, having a single request or fewer than two rows a rank (ATOM `_build_pcp_balanced_slices`).
///
/// # Panics
/// When `world` is 0.
pub fn first_group(world: usize, batch: &[Sequence]) -> usize {
    let rows: usize = batch.iter().map(|sequence| sequence.rows).sum();
    if batch.len() < 2 || rows / world < 2 {
        return batch.len();
    }
    let (mut requests, mut before) = (0, 0);
    while before < rows / 2 {
        before += batch[requests].rows;
        requests += 1;
    }
    requests.clamp(1, batch.len() - 1)
}

/// Places two groups that overlap, each as a batch of its own; `requests` as [`first_group`] gives it.
///
/// # Panics
/// When `world` is 0 or `requests` more than there are.
pub fn place_groups(
    world: usize,
    strategy: Strategy,
    decodes: Decodes,
    batch: &[Sequence],
    requests: usize,
) -> Vec<Placed> {
    let (first, second) = batch.split_at(requests);
    let mut placed = place(world, strategy, decodes, first);
    // no run of one group goes on in the other
    let runs = 1 + placed.iter().map(|row| row.run).max().unwrap_or(0);
    let behind = |row: Placed| Placed { request: requests + row.request, run: runs + row.run, ..row };
    placed.extend(place(world, strategy, decodes, second).into_iter().map(behind));
    placed
}

/// Rows that a rank runs: those of the fullest rank, or `at_least` where that is more.
pub fn padded_rows(world: usize, placed: &[Placed], at_least: usize) -> usize {
    let of_rank = |rank| placed.iter().filter(|row| row.is_on(rank)).count();
    (0..world).map(of_rank).max().unwrap_or(0).max(at_least)
}

#[cfg(test)]
mod tests;
