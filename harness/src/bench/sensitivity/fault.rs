//! Faults of known size, injected into the simulated engine.

use shardcheck_formats::{Counter, Dtype, round_bf16};
use shardcheck_references::layout::Layout;
use shardcheck_references::statistics::{BLOCK_TOKENS, Examination};

use super::{DIM, HEADS, KV_HEADS, RANKS, ROWS};
use crate::bench::inputs::Tensors;
use crate::bench::simulation::{ChangeOfHeld, ChangeOfLse, Simulated, Tampering, round_to};

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SizedFault {
    /// One token is missing on its rank.
    TokenLost,
    /// One token is counted twice.
    TokenDoubled,
    /// One rank does not see its last token.
    LengthShort,
    /// Rows see the committed tokens and none of their own.
    CommittedPrefix,
    /// The draft offset is subtracted from every rank's local length.
    LocalMask,
    /// A block of sixteen holds the tokens of another request.
    StaleBlock,
    /// Two query heads are swapped.
    HeadsSwapped,
    /// Merge weights are not divided by their sum.
    Unnormalised,
    /// Ranks return base-2 LSEs and the merge takes them for natural ones.
    LseBase2,
    /// LSEs are rounded to bf16.
    LseInBf16,
    /// One rank's LSE is 0.1 too large.
    RankTenth,
    /// One rank's LSE is 0.01 too large.
    RankHundredth,
    /// One rank's LSE is 0.001 too large.
    RankThousandth,
    /// Values are 1 % too large.
    ValueHundredth,
    /// Values are 0.1 % too large.
    ValueThousandth,
    /// Keys are 1 % too large.
    KeyHundredth,
    /// Keys are 0.3 % too large.
    KeyThreeThousandths,
    /// Values are rounded to e4m3.
    ValueInFp8,
}

/// Where a fault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPlace {
    /// A token.
    Token(usize),
    /// A block: its rank and first token.
    Block(usize, usize),
    /// A rank.
    Rank(usize),
}

impl FaultPlace {
    /// Whether the strongest finding of its kind is it.
    pub fn is_named_by(self, examination: &Examination) -> bool {
        match self {
            Self::Token(position) => examination.token.is_some_and(|token| token.position == position),
            Self::Block(rank, position) => {
                examination.block.is_some_and(|block| (block.rank, block.position) == (rank, position))
            }
            Self::Rank(rank) => {
                let score = |rank: &usize| examination.ranks[*rank].score().abs();
                (0..examination.ranks.len()).max_by(|a, b| score(a).total_cmp(&score(b))) == Some(rank)
            }
        }
    }
}

/// What a faulty engine returned.
pub struct Injected {
    /// Its answer.
    pub seen: Simulated,
    /// Where the fault was, if it is somewhere.
    pub place: Option<FaultPlace>,
}

impl SizedFault {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 18] = [
        Self::TokenLost,
        Self::TokenDoubled,
        Self::LengthShort,
        Self::CommittedPrefix,
        Self::LocalMask,
        Self::StaleBlock,
        Self::HeadsSwapped,
        Self::Unnormalised,
        Self::LseBase2,
        Self::LseInBf16,
        Self::RankTenth,
        Self::RankHundredth,
        Self::RankThousandth,
        Self::ValueHundredth,
        Self::ValueThousandth,
        Self::KeyHundredth,
        Self::KeyThreeThousandths,
        Self::ValueInFp8,
    ];

    /// Name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::TokenLost => "one token lost",
            Self::TokenDoubled => "one token counted twice",
            Self::LengthShort => "one rank's length short by one",
            Self::CommittedPrefix => "rows see the committed prefix",
            Self::LocalMask => "mask on local positions",
            Self::StaleBlock => "stale block of 16",
            Self::HeadsSwapped => "two heads swapped",
            Self::Unnormalised => "weights not normalised",
            Self::LseBase2 => "base-2 LSE taken as natural",
            Self::LseInBf16 => "LSE rounded to bf16",
            Self::RankTenth => "one rank's LSE +0.1",
            Self::RankHundredth => "one rank's LSE +1e-2",
            Self::RankThousandth => "one rank's LSE +1e-3",
            Self::ValueHundredth => "value scale +1 %",
            Self::ValueThousandth => "value scale +0.1 %",
            Self::KeyHundredth => "key scale +1 %",
            Self::KeyThreeThousandths => "key scale +0.3 %",
            Self::ValueInFp8 => "values rounded to e4m3",
        }
    }

    /// Whether it is at one token, block or rank.
    pub fn has_place(self) -> bool {
        matches!(
            self,
            Self::TokenLost
                | Self::TokenDoubled
                | Self::LengthShort
                | Self::StaleBlock
                | Self::RankTenth
                | Self::RankHundredth
                | Self::RankThousandth
        )
    }

    /// Runs the engine with the fault, at a place that is drawn.
    pub fn inject(
        self,
        tensors: &Tensors,
        layout: &Layout,
        random: &mut Counter,
        run: impl Fn(&Tensors, &Tampering) -> Simulated,
    ) -> Injected {
        let tokens = tensors.shape.tokens;
        // of the tokens that every row sees
        let token = random.below((tokens - ROWS) as u64) as usize;
        let rank = random.below(RANKS as u64) as usize;
        let holding =
            |held: ChangeOfHeld| run(tensors, &Tampering { held: Some(held), ..Tampering::default() });
        let sending = |lse: ChangeOfLse| run(tensors, &Tampering { lse: Some(lse), ..Tampering::default() });
        let changed = |change: &dyn Fn(&mut Tensors)| {
            let mut other = tensors.clone();
            change(&mut other);
            run(&other, &Tampering::default())
        };
        let shifted = |error: f32| sending(&move |of, lse| if of == rank { lse + error } else { lse });
        let mut place = None;
        let seen = match self {
            Self::TokenLost => {
                place = Some(FaultPlace::Token(token));
                holding(&|_, _, held| held.retain(|position| *position != token))
            }
            Self::TokenDoubled => {
                place = Some(FaultPlace::Token(token));
                holding(&|_, of, held| {
                    if of == layout.owner(token) {
                        held.push(token);
                    }
                })
            }
            Self::LengthShort => {
                let last = (0..tokens - ROWS + 1).rev().find(|position| layout.owner(*position) == rank);
                place = last.map(FaultPlace::Token);
                holding(&|_, _, held| held.retain(|position| Some(*position) != last))
            }
            Self::CommittedPrefix => holding(&|_, _, held| held.retain(|position| *position < tokens - ROWS)),
            Self::LocalMask => holding(&|row, of, held| {
                let kept = layout.local_len(tokens, of).saturating_sub(ROWS - 1 - row);
                held.truncate(kept);
            }),
            Self::StaleBlock => {
                let blocks = layout.local_len(tokens - ROWS, rank) / BLOCK_TOKENS;
                let first = random.below(blocks.max(1) as u64) as usize * BLOCK_TOKENS;
                place = Some(FaultPlace::Block(rank, layout.global_position(first, rank)));
                changed(&|other| overwrite_block(other, layout, rank, first))
            }
            Self::HeadsSwapped => changed(&|other| {
                for row in other.query.chunks_exact_mut(HEADS * DIM) {
                    let (first, rest) = row.split_at_mut(DIM);
                    first.swap_with_slice(&mut rest[..DIM]);
                }
            }),
            Self::Unnormalised => run(tensors, &Tampering { unnormalised: true, ..Tampering::default() }),
            Self::LseBase2 => sending(&|_, lse| lse * std::f32::consts::LOG2_E),
            Self::LseInBf16 => sending(&|_, lse| round_bf16(lse)),
            Self::RankTenth | Self::RankHundredth | Self::RankThousandth => {
                place = Some(FaultPlace::Rank(rank));
                shifted(match self {
                    Self::RankTenth => 0.1,
                    Self::RankHundredth => 1e-2,
                    _ => 1e-3,
                })
            }
            Self::ValueHundredth => changed(&|other| other.value.iter_mut().for_each(|v| *v *= 1.01)),
            Self::ValueThousandth => changed(&|other| other.value.iter_mut().for_each(|v| *v *= 1.001)),
            Self::KeyHundredth => changed(&|other| other.key.iter_mut().for_each(|k| *k *= 1.01)),
            Self::KeyThreeThousandths => changed(&|other| other.key.iter_mut().for_each(|k| *k *= 1.003)),
            Self::ValueInFp8 => {
                changed(&|other| other.value.iter_mut().for_each(|v| *v = round_to(Dtype::E4m3fn, *v)))
            }
        };
        Injected { seen, place }
    }
}

/// Puts other tokens into a block of a rank.
fn overwrite_block(tensors: &mut Tensors, layout: &Layout, rank: usize, first: usize) {
    let mut random = Counter::new(first as u64, rank as u32);
    let width = KV_HEADS * DIM;
    for local in first..first + BLOCK_TOKENS {
        let position = layout.global_position(local, rank);
        if position + ROWS > tensors.shape.tokens {
            break;
        }
        for tensor in [&mut tensors.key, &mut tensors.value] {
            let row = &mut tensor[position * width..(position + 1) * width];
            row.iter_mut().for_each(|x| *x = round_bf16(random.gaussian() as f32));
        }
    }
}
