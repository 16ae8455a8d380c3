//! The closed list of slips that a failed attention call is held against, and what each would have given.

use std::borrow::Cow;
use std::f64::consts::{LN_2, LOG2_E};

use shardcheck_engine::Mask;
use shardcheck_references::layout::Layout;
use shardcheck_references::merge::log_sum_exp;

use crate::finding::Stage;

use super::attention::RowKind;
use super::prediction::Prediction;
use super::state::State;

/// A slip, simple ones first: where several give the same answer, the first is named first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hypothesis {
    /// Nothing was written.
    Zeros,
    /// Every row sees one token less than it should.
    LastTokenMissing,
    /// Every row sees one token more than it should.
    OneTokenTooMany,
    /// Rows see what was there before the step.
    CommittedPrefix,
    /// Rows see the rows after them.
    NoCausalMask,
    /// Rows of a bidirectional block are masked causally.
    CausalMask,
    /// The tokens of one rank are left out.
    RankMissing,
    /// The tokens of one rank count twice.
    RankTwice,
    /// The partial of one rank was returned as the whole.
    RankAlone,
    /// Local lengths by another interleave size.
    OtherInterleave,
    /// Local lengths as if every rank held the same number.
    EvenLengths,
    /// Weights of the merge in another base than the LSEs.
    MergeBase,
    /// Partials averaged, without their LSEs.
    Averaged,
    /// Partials added up, without their LSEs.
    Summed,
    /// The LSE is in another base than said.
    LseBase,
    /// The axes of the LSE are exchanged.
    LseTransposed,
    /// The LSE of one rank was returned as that of the whole.
    LseOfRank,
    /// Keys are not multiplied by their scale.
    KeyScaleMissing,
    /// Keys are multiplied by their scale twice.
    KeyScaleTwice,
    /// Values are not multiplied by their scale.
    ValueScaleMissing,
    /// Values are multiplied by their scale twice.
    ValueScaleTwice,
    /// Neither keys nor values are multiplied by their scale.
    ScalesMissing,
    /// Keys and values are both multiplied by their scale twice.
    ScalesTwice,
    /// Keys got the scale of values and the other way round.
    ScalesSwapped,
    /// No softmax scale.
    SoftmaxScaleMissing,
    /// The softmax scale twice.
    SoftmaxScaleTwice,
    /// The softmax scale of another width.
    SoftmaxScaleOfWidth,
    /// Natural scores under exp2, or the other way round.
    ExponentialBase,
    /// A head has the output of its neighbour.
    HeadsShifted,
    /// Query heads read KV heads by turns.
    KvHeadsByTurns,
    /// A row has the output of its neighbour.
    RowsShifted,
    /// A request has the output of its neighbour.
    RequestsShifted,
    /// A request reads through the table row of another.
    TableOfOther,
}

type Named<'a> = (Option<String>, Prediction<'a>);

impl Hypothesis {
    /// Every slip.
    pub const ALL: [Self; 33] = [
        Self::Zeros,
        Self::LastTokenMissing,
        Self::OneTokenTooMany,
        Self::CommittedPrefix,
        Self::NoCausalMask,
        Self::CausalMask,
        Self::RankMissing,
        Self::RankTwice,
        Self::RankAlone,
        Self::OtherInterleave,
        Self::EvenLengths,
        Self::MergeBase,
        Self::Averaged,
        Self::Summed,
        Self::LseBase,
        Self::LseTransposed,
        Self::LseOfRank,
        Self::KeyScaleMissing,
        Self::KeyScaleTwice,
        Self::ValueScaleMissing,
        Self::ValueScaleTwice,
        Self::ScalesMissing,
        Self::ScalesTwice,
        Self::ScalesSwapped,
        Self::SoftmaxScaleMissing,
        Self::SoftmaxScaleTwice,
        Self::SoftmaxScaleOfWidth,
        Self::ExponentialBase,
        Self::HeadsShifted,
        Self::KvHeadsByTurns,
        Self::RowsShifted,
        Self::RequestsShifted,
        Self::TableOfOther,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        self.entry().0
    }

    /// Where it happens.
    pub const fn stage(self) -> Stage {
        self.entry().1
    }

    /// What happened, in words; `which` is the rank, request or neighbour concerned.
    pub fn sentence(self, which: Option<&str>) -> String {
        let text = self.entry().2;
        match which {
            Some(which) => format!("{text}: {which}"),
            None => text.to_owned(),
        }
    }

    const fn entry(self) -> (&'static str, Stage, &'static str) {
        use Stage::{Layout, Merge, Output, Partial, Query, RowBound};
        match self {
            Self::Zeros => ("zeros", Output, "the output is zero, as if nothing had been written"),
            Self::LastTokenMissing => (
                "last-token-missing",
                RowBound,
                "the row's last token is left out: its length is one short, or its bound is one early",
            ),
            Self::OneTokenTooMany => (
                "one-token-too-many",
                RowBound,
                "the row sees one token beyond its own: its length or its bound is one too far",
            ),
            Self::CommittedPrefix => (
                "committed-prefix-only",
                RowBound,
                "the row sees the tokens before the step alone, none of the step's own rows",
            ),
            Self::NoCausalMask => {
                ("no-causal-mask", RowBound, "the row sees the whole request, the rows after it included")
            }
            Self::CausalMask => (
                "causal-mask",
                RowBound,
                "the row is masked causally, though rows of this block see all of it",
            ),
            Self::RankMissing => ("rank-missing", Merge, "the share of a rank is missing"),
            Self::RankTwice => ("rank-twice", Merge, "the share of a rank counts twice"),
            Self::RankAlone => ("rank-alone", Merge, "the partial of one rank was returned without a merge"),
            Self::OtherInterleave => {
                ("other-interleave", Layout, "local lengths are computed with another interleave size")
            }
            Self::EvenLengths => {
                ("even-lengths", Layout, "every rank is taken to hold the same number of tokens")
            }
            Self::MergeBase => {
                ("merge-base", Merge, "the merge exponentiates LSEs in another base than they have")
            }
            Self::Averaged => {
                ("partials-averaged", Merge, "the partials are averaged, without the weights of their LSEs")
            }
            Self::Summed => {
                ("partials-summed", Merge, "the partials are added up, without the weights of their LSEs")
            }
            Self::LseBase => {
                ("lse-base", Output, "the output is right and the LSE has another base than lse_base says")
            }
            Self::LseTransposed => {
                ("lse-transposed", Output, "the output is right and the axes of the LSE are exchanged")
            }
            Self::LseOfRank => {
                ("lse-of-rank", Merge, "the output is right and the LSE is that of one rank alone")
            }
            Self::KeyScaleMissing => ("key-scale-missing", Partial, "keys are not multiplied by k_scale"),
            Self::KeyScaleTwice => ("key-scale-twice", Partial, "keys are multiplied by k_scale twice"),
            Self::ValueScaleMissing => {
                ("value-scale-missing", Partial, "values are not multiplied by v_scale")
            }
            Self::ValueScaleTwice => ("value-scale-twice", Partial, "values are multiplied by v_scale twice"),
            Self::ScalesMissing => {
                ("scales-missing", Partial, "neither keys nor values are multiplied by their scale")
            }
            Self::ScalesTwice => {
                ("scales-twice", Partial, "keys and values are multiplied by their scales twice")
            }
            Self::ScalesSwapped => {
                ("scales-swapped", Partial, "keys are multiplied by v_scale and values by k_scale")
            }
            Self::SoftmaxScaleMissing => {
                ("softmax-scale-missing", Partial, "scores are not multiplied by the softmax scale")
            }
            Self::SoftmaxScaleTwice => {
                ("softmax-scale-twice", Partial, "scores are multiplied by the softmax scale twice")
            }
            Self::SoftmaxScaleOfWidth => {
                ("softmax-scale-of-width", Partial, "the softmax scale is that of another width")
            }
            Self::ExponentialBase => (
                "exponential-base",
                Partial,
                "scores are exponentiated in another base than they are scaled for",
            ),
            Self::HeadsShifted => ("heads-shifted", Query, "the head holds the output of its neighbour"),
            Self::KvHeadsByTurns => {
                ("kv-heads-by-turns", Query, "query head h reads KV head h mod K instead of h / (H / K)")
            }
            Self::RowsShifted => {
                ("rows-shifted", Query, "the row holds the output of its neighbour in the request")
            }
            Self::RequestsShifted => {
                ("requests-shifted", Query, "the request holds the output of another one")
            }
            Self::TableOfOther => {
                ("table-of-other", Layout, "the request reads through the block table row of another one")
            }
        }
    }

    /// What the slip would have given in a state: nothing where it can't happen, several where it may be of several kinds.
    pub(super) fn predictions<'a>(self, state: &State<'a>) -> Vec<Named<'a>> {
        let prefix = |end: usize| Prediction::softmax(state, (0..end).map(|i| (i, 1.0, state.scores[i])));
        let (n, length, rows) = (state.visible, state.seq_len(), state.rows());
        let alone = |prediction| vec![(None, prediction)];
        match self {
            Self::Zeros => alone(Prediction::Given { out: vec![0.0; state.call.v_dim], lse: None }),
            Self::LastTokenMissing if n > 0 => alone(prefix(n - 1)),
            Self::OneTokenTooMany if n < length => alone(prefix(n + 1)),
            Self::OneTokenTooMany => beyond(state, [n]).map(alone).unwrap_or_default(),
            Self::CommittedPrefix if rows > 1 && length >= rows => alone(prefix(length - rows)),
            Self::NoCausalMask if n < length => alone(prefix(length)),
            Self::CausalMask if state.call.mask == Mask::Bidirectional && rows > 1 => {
                alone(prefix((length + 1 + state.row).saturating_sub(rows)))
            }
            Self::RankMissing | Self::RankTwice | Self::RankAlone => ranks(self, state),
            Self::OtherInterleave | Self::EvenLengths => lengths(self, state),
            Self::MergeBase | Self::Averaged | Self::Summed => merges(self, state),
            Self::LseBase | Self::LseTransposed | Self::LseOfRank => lses(self, state),
            Self::HeadsShifted | Self::RowsShifted | Self::RequestsShifted => neighbours(self, state),
            Self::KvHeadsByTurns => by_turns(state).map(alone).unwrap_or_default(),
            Self::TableOfOther => tables(state),
            _ => scales(self, state),
        }
    }
}

/// The row's tokens and those at further positions, through the request's own table.
fn beyond<'a>(state: &State<'a>, further: impl IntoIterator<Item = usize>) -> Option<Prediction<'a>> {
    let held = state.call.gather(state.request, further)?;
    let scores = state.scores_of(&held, state.kv_head);
    let own = (0..state.visible).map(|i| (i, 1.0, state.scores[i])).collect();
    let more = scores.into_iter().enumerate().map(|(i, score)| (i, 1.0, score)).collect();
    let request = &state.call.requests[state.request].held;
    let prediction = Prediction::softmax_over(
        vec![(Cow::Borrowed(request), own), (Cow::Owned(held), more)],
        state.kv_head,
    );
    Some(prediction)
}

fn ranks<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    let layout = &state.call.pages.layout;
    if layout.world() == 1 {
        return Vec::new();
    }
    let counts = |rank: usize, position: usize| match (hypothesis, layout.owner(position) == rank) {
        (Hypothesis::RankMissing, own) => f64::from(u8::from(!own)),
        (Hypothesis::RankTwice, own) => f64::from(1 + u8::from(own)),
        (_, own) => f64::from(u8::from(own)),
    };
    (0..layout.world())
        .map(|rank| {
            let tokens = (0..state.visible).map(|i| (i, counts(rank, i), state.scores[i]));
            (Some(format!("rank {rank}")), Prediction::softmax(state, tokens))
        })
        .collect()
}

fn lengths<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    let (layout, n) = (&state.call.pages.layout, state.visible);
    let world = layout.world();
    if world == 1 {
        return Vec::new();
    }
    let mut kinds: Vec<(String, Vec<usize>)> = Vec::new();
    if hypothesis == Hypothesis::EvenLengths {
        kinds.push(("rounded down".to_owned(), vec![n / world; world]));
        kinds.push(("rounded up".to_owned(), vec![n.div_ceil(world); world]));
    } else {
        for run in [1, state.call.pages.block] {
            if let Ok(other) = Layout::new(world, run, state.call.pages.block.max(run))
                && run != layout.interleave()
            {
                let lens = (0..world).map(|rank| other.local_len(n, rank)).collect();
                kinds.push((format!("{run} instead of {}", layout.interleave()), lens));
            }
        }
    }
    let right: Vec<usize> = (0..world).map(|rank| layout.local_len(n, rank)).collect();
    let predicted = |(which, lens): (String, Vec<usize>)| {
        if lens == right {
            return None;
        }
        let positions =
            (0..world).flat_map(|rank| (0..lens[rank]).map(move |local| layout.global_position(local, rank)));
        let (own, further): (Vec<usize>, Vec<usize>) = positions.partition(|p| *p < state.scores.len());
        let held = state.call.gather(state.request, further)?;
        let more = state.scores_of(&held, state.kv_head).into_iter().enumerate();
        let sources = vec![
            (
                Cow::Borrowed(&state.call.requests[state.request].held),
                own.into_iter().map(|i| (i, 1.0, state.scores[i])).collect(),
            ),
            (Cow::Owned(held), more.map(|(i, score)| (i, 1.0, score)).collect()),
        ];
        Some((Some(which), Prediction::softmax_over(sources, state.kv_head)))
    };
    kinds.into_iter().filter_map(predicted).collect()
}

/// Natural LSE of each rank's tokens.
fn lse_by_rank(state: &State<'_>) -> Vec<f64> {
    let layout = &state.call.pages.layout;
    let of_rank = |rank: usize| {
        let own = (0..state.visible).filter(move |i| layout.owner(*i) == rank);
        log_sum_exp(own.map(|i| state.scores[i]))
    };
    (0..layout.world()).map(of_rank).collect()
}

fn merges<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    let layout = &state.call.pages.layout;
    if layout.world() == 1 {
        return Vec::new();
    }
    let lse = lse_by_rank(state);
    // a partial's token weighs e^(score − its rank's LSE); times what the merge gives the rank
    let weighted = |of_rank: &dyn Fn(usize) -> f64| {
        let weight = |i: usize| {
            let rank = layout.owner(i);
            (i, (state.scores[i] - lse[rank]).exp() * of_rank(rank))
        };
        Prediction::weighted(state, (0..state.visible).map(weight).collect())
    };
    let in_base = |factor: f64| {
        let total = log_sum_exp(lse.iter().map(|lse| lse * factor).filter(|lse| !lse.is_nan()));
        weighted(&|rank| (lse[rank] * factor - total).exp())
    };
    let held = lse.iter().filter(|lse| lse.is_finite()).count().max(1);
    match hypothesis {
        Hypothesis::MergeBase => vec![
            (Some("2^LSE of natural LSEs".to_owned()), in_base(LN_2)),
            (Some("e^LSE of LSEs in base 2".to_owned()), in_base(LOG2_E)),
        ],
        Hypothesis::Averaged => {
            let world = layout.world();
            vec![
                (Some("over all ranks".to_owned()), weighted(&|_| 1.0 / world as f64)),
                (Some("over ranks that hold tokens".to_owned()), weighted(&|_| 1.0 / held as f64)),
            ]
        }
        _ => vec![(None, weighted(&|_| 1.0))],
    }
}

fn lses<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    if state.target.seen_lse.is_none() {
        return Vec::new();
    }
    let given = |lse: f64| Prediction::Given { out: state.target.right.to_vec(), lse: Some(lse) };
    match hypothesis {
        Hypothesis::LseBase => vec![
            (Some("base 2 instead of e".to_owned()), given(state.target.lse * LOG2_E)),
            (Some("base e instead of 2".to_owned()), given(state.target.lse * LN_2)),
        ],
        Hypothesis::LseTransposed => {
            let (heads, tokens) = (state.call.heads, state.truth.rows.len());
            let flat = state.spot.token * heads + state.spot.head;
            let (head, token) = (flat / tokens, flat % tokens);
            vec![(None, given(state.truth.lse[token * heads + head]))]
        }
        _ if state.call.pages.layout.world() > 1 => {
            let ranks = lse_by_rank(state).into_iter().enumerate();
            ranks.map(|(rank, lse)| (Some(format!("rank {rank}")), given(lse))).collect()
        }
        _ => Vec::new(),
    }
}

fn scales<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    let call = state.call;
    let (k, v, scale) = (call.k_scale, call.v_scale, call.scale);
    let of_width = |width: usize| 1.0 / (width as f64).sqrt() / scale;
    let kinds: Vec<(Option<String>, f64, f64)> = match hypothesis {
        Hypothesis::KeyScaleMissing => vec![(None, 1.0 / k, 1.0)],
        Hypothesis::KeyScaleTwice => vec![(None, k, 1.0)],
        Hypothesis::ValueScaleMissing => vec![(None, 1.0, 1.0 / v)],
        Hypothesis::ValueScaleTwice => vec![(None, 1.0, v)],
        Hypothesis::ScalesMissing => vec![(None, 1.0 / k, 1.0 / v)],
        Hypothesis::ScalesTwice => vec![(None, k, v)],
        Hypothesis::ScalesSwapped => vec![(None, v / k, k / v)],
        Hypothesis::SoftmaxScaleMissing => vec![(None, 1.0 / scale, 1.0)],
        Hypothesis::SoftmaxScaleTwice => vec![(None, scale, 1.0)],
        Hypothesis::SoftmaxScaleOfWidth => [call.qk_dim, call.v_dim]
            .into_iter()
            .map(|width| (Some(format!("1/sqrt({width})")), of_width(width), 1.0))
            .collect(),
        Hypothesis::ExponentialBase => vec![
            (Some("2^score of natural scores".to_owned()), LN_2, 1.0),
            (Some("e^score of scores for base 2".to_owned()), LOG2_E, 1.0),
        ],
        _ => Vec::new(),
    };
    let changes = |(_, on_scores, on_values): &(Option<String>, f64, f64)| {
        (on_scores - 1.0).abs() > 1e-6 || (on_values - 1.0).abs() > 1e-6
    };
    let predicted = |(which, on_scores, on_values): (Option<String>, f64, f64)| {
        let tokens = (0..state.visible).map(|i| (i, 1.0, state.scores[i] * on_scores));
        let prediction = Prediction::softmax(state, tokens).times(on_values);
        // whether the LSE is brought back to base e is another question
        let is_base = hypothesis == Hypothesis::ExponentialBase;
        (which, if is_base { prediction.without_lse() } else { prediction })
    };
    kinds.into_iter().filter(changes).map(predicted).collect()
}

fn neighbours<'a>(hypothesis: Hypothesis, state: &State<'a>) -> Vec<Named<'a>> {
    let call = state.call;
    let of = |token: usize, head: usize| {
        if state.truth.rows[token] == RowKind::Undefined {
            return None;
        }
        let at = token * call.heads + head;
        let out = state.truth.out[at * call.v_dim..(at + 1) * call.v_dim].to_vec();
        Some(Prediction::Given { out, lse: Some(state.truth.lse[at]) })
    };
    let (token, head) = (state.spot.token, state.spot.head);
    let mut found = Vec::new();
    for (which, by) in [("the one after it", 1isize), ("the one before it", -1)] {
        let around = |at: usize, count: usize| (at + count).wrapping_add_signed(by) % count;
        let place = match hypothesis {
            Hypothesis::HeadsShifted if call.heads > 1 => Some((token, around(head, call.heads))),
            Hypothesis::RowsShifted if state.rows() > 1 => {
                let first = call.requests[state.request].rows.start;
                Some((first + around(state.row, state.rows()), head))
            }
            Hypothesis::RequestsShifted if call.requests.len() > 1 => {
                let other = &call.requests[around(state.request, call.requests.len())];
                (state.row < other.rows.len()).then(|| (other.rows.start + state.row, head))
            }
            _ => None,
        };
        if let Some(prediction) = place.and_then(|(token, head)| of(token, head)) {
            found.push((Some(which.to_owned()), prediction));
        }
    }
    found
}

fn by_turns<'a>(state: &State<'a>) -> Option<Prediction<'a>> {
    let kv_head = state.spot.head % state.call.kv_heads;
    if kv_head == state.kv_head {
        return None;
    }
    let held = &state.call.requests[state.request].held;
    let scores = state.scores_of(held, kv_head);
    let tokens = (0..state.visible).map(|i| (i, 1.0, scores[i])).collect();
    Some(Prediction::softmax_over(vec![(Cow::Borrowed(held), tokens)], kv_head))
}

/// Most other requests whose table row is tried.
const MOST_TABLES: usize = 8;
/// Most numbers of keys that are copied for them; one request is tried in any case.
const MOST_COPIED: usize = 40_000_000;

fn tables<'a>(state: &State<'a>) -> Vec<Named<'a>> {
    let requests = state.call.requests.len();
    // near ones first: shifted batches are more usual than any other confusion
    let mut others: Vec<usize> = (0..requests).filter(|other| *other != state.request).collect();
    others.sort_by_key(|other| other.abs_diff(state.request));
    let most = (MOST_COPIED / (state.visible * state.call.qk_dim).max(1)).clamp(1, MOST_TABLES);
    let predicted = |other: usize| {
        let held = state.call.gather(other, 0..state.visible)?;
        let scores = state.scores_of(&held, state.kv_head).into_iter().enumerate();
        let tokens = scores.map(|(i, score)| (i, 1.0, score)).collect();
        let prediction = Prediction::softmax_over(vec![(Cow::Owned(held), tokens)], state.kv_head);
        Some((Some(format!("request {other}")), prediction))
    };
    others.into_iter().take(most).filter_map(predicted).collect()
}
