//! Judging integers: local lengths, slots and row lengths as a user's own function gives them.

use shardcheck_engine::{Mask, Tensor, Tensors};
use shardcheck_references::layout::{Layout, NO_SLOT};

use crate::finding::Stage;
use crate::judge::{Allowed, Comparison};

use super::report::{Diagnosis, Explanation, Report};
use super::sizes::{counts, integers};
use super::{CheckError, Header};

/// Most wrong integers that a failure lists.
const MOST_LISTED: usize = 6;

/// Most rows of a step whose local lengths are judged without the rows' own integers.
const MOST_ROWS: usize = 1 << 24;

/// A slip of layout arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayoutHypothesis {
    /// Another interleave size.
    OtherInterleave,
    /// The same number on every rank.
    EvenLengths,
    /// Ranks in reverse order.
    RanksReversed,
    /// Every rank has what belongs to the next one.
    RanksShifted,
    /// Global numbers where local ones are asked.
    NotDealt,
    /// One token less.
    OneShort,
    /// One token more.
    OneLong,
    /// What was there before the step.
    CommittedPrefix,
    /// Rows see the rows after them.
    NoCausalMask,
    /// The draft's offset is subtracted from the local length.
    LocalTrim,
    /// Tokens of other ranks are not marked.
    NotMasked,
    /// Tokens of other ranks are marked by 0.
    MarkedByZero,
    /// Block numbers without the table.
    NoTable,
}

impl LayoutHypothesis {
    /// Every slip.
    pub const ALL: [Self; 13] = [
        Self::OtherInterleave,
        Self::EvenLengths,
        Self::RanksReversed,
        Self::RanksShifted,
        Self::NotDealt,
        Self::OneShort,
        Self::OneLong,
        Self::CommittedPrefix,
        Self::NoCausalMask,
        Self::LocalTrim,
        Self::NotMasked,
        Self::MarkedByZero,
        Self::NoTable,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        self.entry().0
    }

    /// What happened, in words.
    pub const fn sentence(self) -> &'static str {
        self.entry().1
    }

    const fn entry(self) -> (&'static str, &'static str) {
        match self {
            Self::OtherInterleave => ("other-interleave", "computed with another interleave size"),
            Self::EvenLengths => ("even-lengths", "every rank is taken to hold the same number of tokens"),
            Self::RanksReversed => ("ranks-reversed", "the ranks are counted from the other end"),
            Self::RanksShifted => ("ranks-shifted", "a rank has what belongs to the next one"),
            Self::NotDealt => ("not-dealt", "computed as if one rank held all tokens"),
            Self::OneShort => ("one-short", "computed for one token less"),
            Self::OneLong => ("one-long", "computed for one token more"),
            Self::CommittedPrefix => {
                ("committed-prefix-only", "computed for the tokens before the step alone")
            }
            Self::NoCausalMask => ("no-causal-mask", "every row has the length of its whole request"),
            Self::LocalTrim => (
                "local-trim",
                "the offset of the row is subtracted from the local length instead of the global one",
            ),
            Self::NotMasked => ("not-masked", "tokens of other ranks have a slot of this rank instead of -1"),
            Self::MarkedByZero => ("marked-by-zero", "tokens of other ranks have slot 0 instead of -1"),
            Self::NoTable => ("no-table", "slots are computed without the block table"),
        }
    }
}

/// One row of a step: the request it belongs to, and how many of its tokens precede it or are it.
#[derive(Debug, Clone, Copy)]
struct Row {
    request: usize,
    /// Row within the request.
    row: usize,
    /// Rows of the request.
    rows: usize,
    seq_len: usize,
}

impl Row {
    fn position(self) -> Option<usize> {
        (self.seq_len + self.row).checked_sub(self.rows)
    }
}

/// What is asked for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    LocalLens,
    SlotMapping,
    RowLens,
}

impl Quantity {
    const ALL: [Self; 3] = [Self::LocalLens, Self::SlotMapping, Self::RowLens];

    fn name(self) -> &'static str {
        match self {
            Self::LocalLens => "local_lens",
            Self::SlotMapping => "slot_mapping",
            Self::RowLens => "row_lens",
        }
    }

    fn stage(self) -> Stage {
        if self == Self::RowLens { Stage::RowBound } else { Stage::Layout }
    }
}

/// The batch whose integers are judged.
struct Batch {
    layout: Layout,
    mask: Mask,
    seq_lens: Vec<usize>,
    rows: Vec<Row>,
    /// `[requests, width]`.
    table: Vec<i64>,
    width: usize,
    ranks: Vec<usize>,
}

/// How a slip changes the arithmetic.
#[derive(Debug, Clone, Copy)]
struct Slip {
    layout: Layout,
    kind: Option<LayoutHypothesis>,
}

/// Judges the integers of a batch.
///
/// # Errors
/// [`CheckError`]: what is missing, or does not fit.
pub(super) fn judge(header: &Header, tensors: &Tensors) -> Result<Report, CheckError> {
    let mut report = Report::new(header.check);
    let mut any = false;
    for quantity in Quantity::ALL {
        let Some(tensor) = tensors.find(quantity.name()) else { continue };
        any = true;
        let batch = Batch::read(header, tensors, quantity, tensor)?;
        let seen = batch.seen(quantity, tensor)?;
        let right = Slip { layout: batch.layout, kind: None };
        let expected = batch.expected(quantity, right).expect("the right answer is always there");
        let mut comparison = Comparison::new(quantity.name());
        let mut wrong = Vec::new();
        for (index, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
            comparison.element(index, *seen as f64, Allowed::Exactly(*expected as f64));
            if seen != expected {
                wrong.push(format!("{}: {seen} instead of {expected}", batch.place(quantity, index)));
            }
        }
        report.add(&comparison, &[]);
        if !comparison.holds() {
            let place = |index: usize| batch.place(quantity, index);
            let mut failure = comparison.failure("", quantity.stage(), place);
            failure.headline = format!("{} of {} {} are wrong", wrong.len(), seen.len(), quantity.name());
            failure.notes.extend(wrong.iter().take(MOST_LISTED).map(|line| format!("wrong      {line}")));
            if wrong.len() > MOST_LISTED {
                failure.notes.push(format!("wrong      and {} more", wrong.len() - MOST_LISTED));
            }
            report.failures.push(failure);
            let diagnosis = report.diagnosis.get_or_insert_with(Diagnosis::default);
            diagnosis.failed_states += wrong.len();
            diagnosis.looked_at += wrong.len();
            diagnosis.explanations.extend(batch.explanations(quantity, &seen, &expected, wrong.len()));
        }
    }
    if !any {
        let why = "the image has none of local_lens, slot_mapping, row_lens: there is nothing to judge";
        return Err(CheckError::Value(why.to_owned()));
    }
    Ok(report.settled())
}

impl Batch {
    fn read(
        header: &Header,
        tensors: &Tensors,
        quantity: Quantity,
        seen: &Tensor,
    ) -> Result<Self, CheckError> {
        let why = "tokens of a block, which slots are counted in";
        let block = match (header.block_size, quantity) {
            (Some(block), _) => block,
            (None, Quantity::SlotMapping) => return Err(CheckError::Field { field: "block_size", why }),
            (None, _) => header.interleave,
        };
        let layout = Layout::new(header.world, header.interleave, block)?;
        let ranks = match header.rank {
            Some(rank) if rank >= header.world => {
                return Err(CheckError::Value(format!(
                    "rank is {rank}, but there are {} ranks",
                    header.world
                )));
            }
            Some(rank) => vec![rank],
            None => (0..header.world).collect(),
        };
        let seq_lens = counts("seq_lens", tensors.get("seq_lens")?)?;
        let columns = seen.shape().last().copied().unwrap_or(0);
        let rows =
            rows_of(tensors, &seq_lens, if quantity == Quantity::LocalLens { None } else { Some(columns) })?;
        let mut batch =
            Self { layout, mask: header.mask, seq_lens, rows, table: Vec::new(), width: 0, ranks };
        if quantity == Quantity::SlotMapping {
            let table = tensors.get("block_table")?;
            let [requests, width] = *table.shape() else {
                return Err(CheckError::shape("block_table", table.shape(), "[requests, width]"));
            };
            batch.table = integers("block_table", table)?;
            batch.width = width;
            batch.check_table(requests)?;
        }
        Ok(batch)
    }

    fn check_table(&self, requests: usize) -> Result<(), CheckError> {
        let span = self.layout.virtual_block_tokens();
        for row in &self.rows {
            let (request, width, covers) = (row.request, self.width, self.width * span);
            let seq_len = row.seq_len;
            if request >= requests || row.position().is_some_and(|position| position >= covers) {
                return Err(CheckError::ShortTable { request, width, covers, seq_len });
            }
        }
        Ok(())
    }

    /// The integers that were given, one rank after another; what a slot mapping has beyond the rows must be −1 and is cut.
    fn seen(&self, quantity: Quantity, tensor: &Tensor) -> Result<Vec<i64>, CheckError> {
        let name = quantity.name();
        let columns = if quantity == Quantity::LocalLens { self.seq_lens.len() } else { self.rows.len() };
        let given = match *tensor.shape() {
            [given] if self.ranks.len() == 1 => given,
            [ranks, given] if ranks == self.ranks.len() => given,
            _ => 0,
        };
        let padded = quantity == Quantity::SlotMapping && given >= columns;
        if given != columns && !padded || tensor.is_empty() && columns > 0 {
            let of_ranks =
                if self.ranks.len() > 1 { format!("{}, ", self.ranks.len()) } else { String::new() };
            let wanted = format!("[{of_ranks}{columns}]; give `rank` for the integers of one rank");
            return Err(CheckError::shape(name, tensor.shape(), wanted));
        }
        let all = integers(name, tensor)?;
        let of_rank = |rank: usize| &all[rank * given..(rank + 1) * given];
        for rank in 0..self.ranks.len() {
            if let Some(index) = of_rank(rank)[columns..].iter().position(|slot| *slot != NO_SLOT) {
                return Err(CheckError::Value(format!(
                    "{name}: entry {} of rank {} is padding, beyond the {columns} rows, and not -1",
                    columns + index,
                    self.ranks[rank]
                )));
            }
        }
        Ok((0..self.ranks.len()).flat_map(|rank| &of_rank(rank)[..columns]).copied().collect())
    }

    /// What a slip gives, one rank after another; `None` where it can't happen.
    fn expected(&self, quantity: Quantity, slip: Slip) -> Option<Vec<i64>> {
        let mut all = Vec::new();
        for rank in &self.ranks {
            match quantity {
                Quantity::LocalLens => {
                    for (request, len) in self.seq_lens.iter().enumerate() {
                        all.push(self.local_len(*len, *rank, request, slip)? as i64);
                    }
                }
                Quantity::RowLens => {
                    for row in &self.rows {
                        all.push(self.row_len(*row, *rank, slip)? as i64);
                    }
                }
                Quantity::SlotMapping => {
                    for row in &self.rows {
                        all.push(self.slot(*row, *rank, slip)?);
                    }
                }
            }
        }
        Some(all)
    }

    fn counted_rank(&self, rank: usize, slip: Slip) -> usize {
        let world = self.layout.world();
        match slip.kind {
            Some(LayoutHypothesis::RanksReversed) => world - 1 - rank,
            Some(LayoutHypothesis::RanksShifted) => (rank + 1) % world,
            _ => rank,
        }
    }

    fn local_len(&self, len: usize, rank: usize, request: usize, slip: Slip) -> Option<usize> {
        use LayoutHypothesis as Kind;
        let rows = self.rows.iter().find(|row| row.request == request).map_or(0, |row| row.rows);
        let counted = match slip.kind {
            Some(Kind::OneShort) => len.saturating_sub(1),
            Some(Kind::OneLong) => len + 1,
            Some(Kind::CommittedPrefix) if rows > 0 => len.saturating_sub(rows),
            Some(Kind::EvenLengths) => return Some(len / self.layout.world()),
            Some(Kind::NotDealt) => return Some(len),
            Some(Kind::OtherInterleave | Kind::RanksReversed | Kind::RanksShifted) | None => len,
            Some(_) => return None,
        };
        Some(slip.layout.local_len(counted, self.counted_rank(rank, slip)))
    }

    fn row_len(&self, row: Row, rank: usize, slip: Slip) -> Option<usize> {
        use LayoutHypothesis as Kind;
        let Row { seq_len, rows, .. } = row;
        let bound = match self.mask {
            Mask::Causal => (seq_len + 1 + row.row).saturating_sub(rows),
            Mask::Bidirectional => seq_len,
        };
        let counted = match slip.kind {
            Some(Kind::NoCausalMask) => seq_len,
            Some(Kind::CommittedPrefix) => seq_len.saturating_sub(rows),
            Some(Kind::LocalTrim) => {
                return Some((slip.layout.local_len(seq_len, rank) + 1 + row.row).saturating_sub(rows));
            }
            _ => return self.local_len(bound, rank, row.request, slip),
        };
        Some(slip.layout.local_len(counted, rank))
    }

    fn slot(&self, row: Row, rank: usize, slip: Slip) -> Option<i64> {
        use LayoutHypothesis as Kind;
        let (layout, block) = (slip.layout, self.layout.block());
        let Some(position) = row.position() else { return Some(NO_SLOT) };
        let position = match slip.kind {
            Some(Kind::OneShort) => position.checked_sub(1)?,
            Some(Kind::OneLong) => position + 1,
            Some(Kind::EvenLengths | Kind::CommittedPrefix | Kind::NoCausalMask | Kind::LocalTrim) => {
                return None;
            }
            _ => position,
        };
        let span = if slip.kind == Some(Kind::NotDealt) { block } else { layout.virtual_block_tokens() };
        let entry = position / span;
        if entry >= self.width {
            return None;
        }
        let number = match slip.kind {
            Some(Kind::NoTable) => entry as i64,
            _ => self.table[row.request * self.width + entry],
        };
        let own = layout.owner(position) == self.counted_rank(rank, slip);
        let offset = match slip.kind {
            Some(Kind::NotDealt) => position % block,
            _ => layout.local_index(position) % block,
        };
        match slip.kind {
            _ if own => {}
            Some(Kind::NotDealt | Kind::NotMasked) => {}
            Some(Kind::MarkedByZero) => return Some(0),
            _ => return Some(NO_SLOT),
        }
        Some(number * block as i64 + offset as i64)
    }

    /// The slips that give exactly what was seen.
    fn explanations(
        &self,
        quantity: Quantity,
        seen: &[i64],
        expected: &[i64],
        wrong: usize,
    ) -> Vec<Explanation> {
        let mut found = Vec::new();
        let (world, block) = (self.layout.world(), self.layout.block());
        for kind in LayoutHypothesis::ALL {
            let runs = match kind {
                LayoutHypothesis::OtherInterleave => {
                    (1..=block).filter(|run| *run != self.layout.interleave()).collect()
                }
                _ => vec![self.layout.interleave()],
            };
            for run in runs {
                let Ok(layout) = Layout::new(world, run, block) else { continue };
                let given = self.expected(quantity, Slip { layout, kind: Some(kind) });
                if given.as_deref() == Some(seen) && seen != expected {
                    let which = (kind == LayoutHypothesis::OtherInterleave)
                        .then(|| format!("{run} instead of {}", self.layout.interleave()));
                    let of_which = which.as_ref().map(|which| format!(": {which}")).unwrap_or_default();
                    found.push(Explanation {
                        hypothesis: kind.name().to_owned(),
                        which,
                        stage: quantity.stage(),
                        sentence: format!("{} {}{of_which}", quantity.name(), kind.sentence()),
                        explains: wrong,
                        requests: Vec::new(),
                    });
                    break;
                }
            }
        }
        found
    }

    fn place(&self, quantity: Quantity, index: usize) -> String {
        if quantity == Quantity::LocalLens {
            let requests = self.seq_lens.len();
            let (rank, request) = (self.ranks[index / requests], index % requests);
            return format!("rank {rank}, request {request} of {} tokens", self.seq_lens[request]);
        }
        let (rank, row) = (self.ranks[index / self.rows.len()], self.rows[index % self.rows.len()]);
        let position = row.position().map_or("none".to_owned(), |position| position.to_string());
        format!("rank {rank}, request {}, row {}, position {position}", row.request, row.row)
    }
}

/// Rows of every request: by `query_start_loc`, or as many for each as fill `columns`.
fn rows_of(tensors: &Tensors, seq_lens: &[usize], columns: Option<usize>) -> Result<Vec<Row>, CheckError> {
    let requests = seq_lens.len();
    let counts_of = match tensors.find("query_start_loc") {
        Some(starts) => {
            let starts = counts("query_start_loc", starts)?;
            let end = starts.last().copied().unwrap_or(0);
            let most = columns.unwrap_or(MOST_ROWS);
            let ascending = starts.windows(2).all(|pair| pair[0] <= pair[1]);
            if starts.len() != requests + 1 || !ascending || end > most {
                return Err(CheckError::Value(format!(
                    "query_start_loc is {starts:?}: give {} ascending offsets, up to {most} at most",
                    requests + 1
                )));
            }
            starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
        }
        None => match columns {
            None => vec![0; requests],
            Some(columns) if requests > 0 && columns.is_multiple_of(requests) => {
                vec![columns / requests; requests]
            }
            Some(columns) => {
                return Err(CheckError::Value(format!(
                    "{columns} rows for {requests} requests: give query_start_loc where requests have different numbers of rows"
                )));
            }
        },
    };
    let row = |(request, rows): (usize, usize)| {
        (0..rows).map(move |row| Row { request, row, rows, seq_len: seq_lens[request] })
    };
    Ok(counts_of.into_iter().enumerate().flat_map(row).collect())
}

#[cfg(test)]
mod tests;
