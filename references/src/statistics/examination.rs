//! The examination of one output: what was found in its residual, and what of it is an alarm.

use super::filter::Filter;
use super::model::{Floors, Model};
use super::shares::{load, tiles};
use super::sums::{LANES, TILE, dot, dots, filled};
use crate::attention::plain::Element;
use std::fmt;
use std::str::FromStr;

/// What can be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Detector {
    /// The mean squared deviation of all elements.
    ChiSquare,
    /// That of one state.
    RowChiSquare,
    /// A token that is lost or counted twice.
    Token,
    /// A block of a rank's tokens.
    Block,
    /// A rank's LSE.
    RankLse,
    /// The scale of the values, or the normalisation.
    ValueScale,
    /// The scale of the keys.
    KeyScale,
}

impl Detector {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::ChiSquare,
        Self::RowChiSquare,
        Self::Token,
        Self::Block,
        Self::RankLse,
        Self::ValueScale,
        Self::KeyScale,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ChiSquare => "chi-square",
            Self::RowChiSquare => "row-chi-square",
            Self::Token => "token",
            Self::Block => "block",
            Self::RankLse => "rank-lse",
            Self::ValueScale => "value-scale",
            Self::KeyScale => "key-scale",
        }
    }

    /// The value above which it raises an alarm: a mean square for the first two, a score in standard deviations for the
    /// others. Set on conforming simulations: the largest seen were 1.06 (χ²), 4.1 (token), 6.6 (block, heavy tails)
    /// and below 6 (ranks and scales).
    pub const fn limit(self) -> f64 {
        match self {
            Self::ChiSquare => 1.5,
            Self::RowChiSquare => 3.0,
            Self::Token => 6.5,
            Self::Block => 8.0,
            Self::RankLse | Self::ValueScale | Self::KeyScale => 6.0,
        }
    }
}

impl fmt::Display for Detector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no detector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown detector `{found}`: use one of chi-square, row-chi-square, token, block, rank-lse, value-scale, key-scale"
)]
pub struct UnknownDetector {
    /// The text that was given.
    pub found: String,
}

impl FromStr for Detector {
    type Err = UnknownDetector;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|detector| detector.name() == text)
            .ok_or_else(|| UnknownDetector { found: text.to_owned() })
    }
}

/// Fewest elements over which χ² is judged.
const CHI_SQUARE_ELEMENTS: usize = 4096;
/// Fewest elements of a state whose own χ² is judged.
const ROW_ELEMENTS: usize = 128;
/// Amplitudes of a lost or doubled token or block. Rounding of a dominant token's own probability reaches `u_p`.
const AMPLITUDES: std::ops::Range<f64> = 0.3..3.0;

/// The largest score of its kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Suspect {
    /// The filter.
    pub filter: Filter,
    /// The rank that holds it.
    pub rank: usize,
    /// Global position of the token; of the first one for a block.
    pub position: usize,
}

impl Suspect {
    /// Whether the amplitude is one of a lost or doubled token.
    pub fn is_plausible(&self) -> bool {
        AMPLITUDES.contains(&self.filter.amplitude().abs())
    }
}

/// The state with the largest mean squared deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowSquare {
    /// Query row.
    pub row: usize,
    /// Query head.
    pub head: usize,
    /// `Σ ((out − o)/σ)² / v_dim`.
    pub mean: f64,
}

/// One finding above its limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alarm {
    /// What raised it.
    pub detector: Detector,
    /// Mean square or score.
    pub value: f64,
    /// Amplitude, where there is a template.
    pub amplitude: Option<f64>,
    /// Rank, where the detector names one.
    pub rank: Option<usize>,
    /// Global position of the token or of the block's first one.
    pub position: Option<usize>,
    /// Query row and head, where the detector names them.
    pub state: Option<(usize, usize)>,
}

impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, limit, amplitude) = (self.value, self.detector.limit(), self.amplitude.unwrap_or(0.0));
        let (rank, position) = (self.rank.unwrap_or(0), self.position.unwrap_or(0));
        let score = format!("z {value:.1}, limit {limit}, amplitude {amplitude:+.2e}");
        match self.detector {
            Detector::ChiSquare => write!(f, "mean squared deviation {value:.2}, limit {limit}"),
            Detector::RowChiSquare => {
                let (row, head) = self.state.unwrap_or_default();
                write!(f, "row {row}, head {head}: mean squared deviation {value:.2}, limit {limit}")
            }
            Detector::Token if amplitude < 0.0 => {
                write!(f, "token {position} (rank {rank}) is missing or weighs too little ({score})")
            }
            Detector::Token => {
                write!(f, "token {position} (rank {rank}) is counted twice or weighs too much ({score})")
            }
            Detector::Block => {
                write!(
                    f,
                    "the block of rank {rank} that begins with token {position} weighs wrongly ({score})"
                )
            }
            Detector::RankLse => write!(f, "the LSE of rank {rank} is off by {amplitude:+.2e} ({score})"),
            Detector::ValueScale => write!(f, "outputs are off by {amplitude:+.2e} of their size ({score})"),
            Detector::KeyScale => write!(f, "scores are off by {amplitude:+.2e} of their size ({score})"),
        }
    }
}

/// What one output's residual holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Examination {
    /// Elements that took part.
    pub elements: usize,
    /// States that did not: their gates are shut.
    pub excluded: usize,
    /// `Σ ((out − o)/σ)²`.
    pub square: f64,
    /// The worst state, where states have at least 128 elements.
    pub row: Option<RowSquare>,
    /// The most suspicious token; one of plausible amplitude before all others.
    pub token: Option<Suspect>,
    /// The most suspicious block, likewise.
    pub block: Option<Suspect>,
    /// `[ranks]`.
    pub ranks: Vec<Filter>,
    /// The value scale.
    pub value_scale: Filter,
    /// The key scale.
    pub key_scale: Filter,
    /// Amplitudes that the contract admits.
    pub floors: Floors,
}

impl Examination {
    /// `Σ ((out − o)/σ)² / N`; `None` without elements.
    pub fn chi_square(&self) -> Option<f64> {
        (self.elements > 0).then(|| self.square / self.elements as f64)
    }

    /// Adds what another problem of the same engine and the same ranks showed; tokens and rows, which are the problem's
    /// own, stay.
    ///
    /// # Panics
    /// The number of ranks differs.
    pub fn join(&mut self, other: &Self) {
        assert_eq!(self.ranks.len(), other.ranks.len(), "problems of one engine have the same ranks");
        self.elements += other.elements;
        self.excluded += other.excluded;
        self.square += other.square;
        self.ranks.iter_mut().zip(&other.ranks).for_each(|(to, from)| *to = to.and(*from));
        self.floors.ranks.iter_mut().zip(&other.floors.ranks).for_each(|(to, from)| *to = to.max(*from));
        self.value_scale = self.value_scale.and(other.value_scale);
        self.floors.value_scale = self.floors.value_scale.max(other.floors.value_scale);
        self.key_scale = self.key_scale.and(other.key_scale);
        self.floors.key_scale = self.floors.key_scale.max(other.floors.key_scale);
    }

    /// The largest score of all templates, whether it is an alarm or not.
    pub fn top_score(&self) -> f64 {
        let suspects = self.token.iter().chain(&self.block).map(|suspect| suspect.filter);
        let few = self.ranks.iter().copied().chain([self.value_scale, self.key_scale]);
        suspects.chain(few).map(|filter| filter.score().abs()).fold(0.0, f64::max)
    }

    /// Everything above its limit, in the order of [`Detector::ALL`].
    pub fn alarms(&self) -> Vec<Alarm> {
        let mut alarms = self.square_alarms();
        for (detector, suspect) in [(Detector::Token, &self.token), (Detector::Block, &self.block)] {
            let Some(suspect) = suspect.filter(Suspect::is_plausible) else { continue };
            alarms.extend(alarm(detector, suspect.filter, 0.0).map(|alarm| Alarm {
                rank: Some(suspect.rank),
                position: Some(suspect.position),
                ..alarm
            }));
        }
        let worst = self.ranks.iter().zip(&self.floors.ranks).enumerate();
        let worst = worst
            .filter_map(|(rank, (filter, floor))| Some((rank, alarm(Detector::RankLse, *filter, *floor)?)))
            .max_by(|a, b| a.1.value.abs().total_cmp(&b.1.value.abs()));
        alarms.extend(worst.map(|(rank, alarm)| Alarm { rank: Some(rank), ..alarm }));
        alarms.extend(alarm(Detector::ValueScale, self.value_scale, self.floors.value_scale));
        alarms.extend(alarm(Detector::KeyScale, self.key_scale, self.floors.key_scale));
        alarms
    }

    fn square_alarms(&self) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        let of = |detector, value, state| Alarm {
            detector,
            value,
            amplitude: None,
            rank: None,
            position: None,
            state,
        };
        if let Some(mean) = self.chi_square()
            && self.elements >= CHI_SQUARE_ELEMENTS
            && mean > Detector::ChiSquare.limit()
        {
            alarms.push(of(Detector::ChiSquare, mean, None));
        }
        if let Some(row) = self.row
            && row.mean > Detector::RowChiSquare.limit()
        {
            alarms.push(of(Detector::RowChiSquare, row.mean, Some((row.row, row.head))));
        }
        alarms
    }
}

fn alarm(detector: Detector, filter: Filter, floor: f64) -> Option<Alarm> {
    let (value, amplitude) = (filter.score(), filter.amplitude());
    (value.abs() > detector.limit() && amplitude.abs() > floor).then_some(Alarm {
        detector,
        value: value.abs(),
        amplitude: Some(amplitude),
        rank: None,
        position: None,
        state: None,
    })
}

/// `ρ = (out − o)/σ²` of an output.
pub(super) struct Residual {
    /// `[states][v_dim]`.
    whitened: Vec<f64>,
    /// `[states]`: `Σ ((out − o)/σ)²`.
    squares: Vec<f64>,
}

impl Residual {
    pub(super) fn of<T: Element>(model: &Model<T>, observed: &[f64]) -> Option<Self> {
        assert_eq!(observed.len(), model.precision.len(), "an output is [rows, heads, v_dim]");
        if observed.iter().any(|x| !x.is_finite()) {
            return None;
        }
        let mut residual = Self { whitened: vec![0.0; observed.len()], squares: Vec::new() };
        for (state, moments) in model.moments.states.iter().enumerate() {
            let (range, mut square) = (model.elements(state), 0.0);
            for (at, out) in range.zip(&moments.out) {
                let error = observed[at] - out;
                residual.whitened[at] = error * model.precision[at];
                square += error * residual.whitened[at];
            }
            residual.squares.push(square);
        }
        Some(residual)
    }

    pub(super) fn examine<T: Element>(&self, model: &Model<T>) -> Examination {
        let v_dim = model.problem.v_dim;
        let admitted = || (0..model.admitted.len()).filter(|state| model.admitted[*state]);
        let mut few = model.few.clone();
        for state in admitted() {
            let whitened = &self.whitened[model.elements(state)];
            for (filter, template) in few.iter_mut().zip(model.few_templates(state)) {
                filter.product += dot(&template, whitened);
            }
        }
        let (mut tokens, mut blocks) = (model.token_filters.clone(), model.block_filters.clone());
        self.add_token_products(model, &mut tokens);
        for (block, range) in blocks.iter_mut().zip(&model.tokens.blocks) {
            block.product = tokens[range.clone()].iter().map(|filter| filter.product).sum();
        }
        let of = |filter: &Filter, index: usize| Suspect {
            filter: *filter,
            rank: model.tokens.rank_of(index),
            position: model.tokens.positions[index],
        };
        let ranks = model.tokens.ranks.len();
        let worst = (v_dim >= ROW_ELEMENTS)
            .then(|| admitted().max_by(|a, b| self.squares[*a].total_cmp(&self.squares[*b])))
            .flatten();
        Examination {
            elements: admitted().count() * v_dim,
            excluded: model.admitted.len() - admitted().count(),
            square: admitted().map(|state| self.squares[state]).sum(),
            row: worst.map(|state| RowSquare {
                row: state / model.problem.heads,
                head: state % model.problem.heads,
                mean: self.squares[state] / v_dim as f64,
            }),
            token: worst_suspect(tokens.iter().enumerate().map(|(index, filter)| of(filter, index))),
            block: worst_suspect(
                blocks.iter().zip(&model.tokens.blocks).map(|(filter, range)| of(filter, range.start)),
            ),
            ranks: few[..ranks].to_vec(),
            value_scale: few[ranks],
            key_scale: few[ranks + 1],
            floors: model.floors.clone(),
        }
    }

    /// `⟨ρ, p_j(v_j − o)⟩` of every token.
    fn add_token_products<T: Element>(&self, model: &Model<T>, tokens: &mut [Filter]) {
        let (width, count) = (model.problem.v_dim.next_multiple_of(LANES), model.tokens.positions.len());
        for shares in &model.shares {
            let mut vectors = vec![0.0; shares.states.len() * width];
            let whitened = |state: &usize| &self.whitened[model.elements(*state)];
            load(shares.states.iter().map(whitened), width, &mut vectors);
            let with_out: Vec<f64> = shares
                .states
                .iter()
                .map(|state| dot(whitened(state), &model.moments.states[*state].out))
                .collect();
            let runs = model.tokens.each_run(|_, blocks| {
                let range = blocks[0].start..blocks[blocks.len() - 1].end;
                let mut products = Vec::with_capacity(range.len());
                let mut rows = vec![0.0; TILE * width];
                let mut out = vec![0.0; shares.states.len() * TILE];
                for tile in tiles(range) {
                    let positions = &model.tokens.positions[tile.clone()];
                    let values = positions.iter().map(|&at| model.problem.value_at(at, shares.kv_head));
                    load(values, width, &mut rows);
                    dots(filled(&rows, tile.len(), width), &vectors, width, &mut out);
                    products.extend(tile.clone().enumerate().map(|(row, index)| {
                        (0..shares.states.len())
                            .map(|place| {
                                let p = shares.weights_of(place, count)[index];
                                p * (out[place * TILE + row] - with_out[place])
                            })
                            .sum::<f64>()
                    }));
                }
                products
            });
            for (token, product) in tokens.iter_mut().zip(runs.into_iter().flatten()) {
                token.product += product;
            }
        }
    }
}

/// The largest score, among those of plausible amplitude if there are any.
fn worst_suspect(suspects: impl Iterator<Item = Suspect>) -> Option<Suspect> {
    let key = |suspect: &Suspect| (suspect.is_plausible(), suspect.filter.score().abs());
    suspects.max_by(|a, b| {
        let ((a_plausible, a), (b_plausible, b)) = (key(a), key(b));
        a_plausible.cmp(&b_plausible).then(a.total_cmp(&b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detectors_are_known_by_name() {
        for detector in Detector::ALL {
            assert_eq!(detector.to_string().parse(), Ok(detector));
        }
        assert!("cosine".parse::<Detector>().unwrap_err().to_string().contains("rank-lse"));
    }

    fn suspect(product: f64, energy: f64, position: usize) -> Suspect {
        Suspect { filter: Filter { product, energy, coherent: 0.0 }, rank: 0, position }
    }

    #[test]
    fn the_mean_square_is_that_of_all_problems_together() {
        let floors = super::super::model::Floors { ranks: vec![], value_scale: 0.0, key_scale: 0.0 };
        let none = Filter::default();
        let of = |elements: usize, square: f64| Examination {
            elements,
            excluded: 1,
            square,
            row: None,
            token: None,
            block: None,
            ranks: vec![],
            value_scale: none,
            key_scale: none,
            floors: floors.clone(),
        };
        let mut all = of(4, 6.0);
        assert_eq!((of(0, 0.0).chi_square(), all.chi_square()), (None, Some(1.5)));
        all.join(&of(8, 2.0));
        assert_eq!((all.chi_square(), all.excluded), (Some(8.0 / 12.0), 2));
    }

    #[test]
    fn a_plausible_amplitude_goes_before_a_larger_score() {
        // the first has a score of 20 at an amplitude of 0.02: a dominant token's own rounding
        let suspects = [suspect(2e4, 1e6, 1), suspect(-49.0, 49.0, 2)];
        assert!(!suspects[0].is_plausible() && suspects[1].is_plausible());
        assert_eq!(worst_suspect(suspects.into_iter()).unwrap().position, 2);
        assert_eq!(worst_suspect(suspects[..1].iter().copied()).unwrap().position, 1);
    }

    #[test]
    fn a_filter_alarms_only_above_its_limit_and_above_what_the_contract_admits() {
        let filter = Filter { product: 7e3, energy: 1e6, coherent: 0.0 };
        assert!(alarm(Detector::RankLse, filter, 1e-3).is_some());
        assert!(alarm(Detector::RankLse, filter, 1e-2).is_none(), "the contract admits an LSE error of 0.01");
        assert!(alarm(Detector::Token, filter, 0.0).is_some_and(|alarm| alarm.value == 7.0));
        assert!(alarm(Detector::Block, filter, 0.0).is_none());
    }
}
