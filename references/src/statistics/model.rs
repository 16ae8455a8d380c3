//! How a conforming engine's residual is distributed, and what each template would look like in it.

use super::examination::{Examination, Residual};
use super::filter::Filter;
use super::shares::{Shares, Tokens, load, tiles};
use super::sums::{LANES, TILE, add_weighted, dot, dots, filled};
use crate::attention::plain::{Element, Problem};
use crate::bound::{U32, bound_state, gamma};
use crate::layout::Layout;
use crate::moments::{Moments, Passes, State, Underivable};
use crate::probable::{MIN_DISTINCT, Probable, UNIFORM_CELL, USUAL_CHANCE, probable};
use crate::split::Split;
use crate::visibility::Visible;
use rayon::prelude::*;
use shardcheck_formats::contract::Contract;

/// Consecutive tokens of a rank that one block template holds.
pub const BLOCK_TOKENS: usize = 16;
/// Softmax weight from which a token's own rounding is followed through the templates of ranks and of the key scale.
const HEAVY: f64 = 1.0 / 64.0;

/// How many unit roundoffs of the stored outputs the tokens beside a rank's largest one have to weigh together: below, the rank's
/// output is that token's value and a rest that rounding mostly takes away, so that its errors have a direction.
const LEAST_BESIDE_PEAK: f64 = 8.0;

/// The largest amplitudes that the contract itself admits; above them an amplitude is a fault's.
#[derive(Debug, Clone, PartialEq)]
pub struct Floors {
    /// `[ranks]`: error of a rank's LSE, by its bound, and of its merge weight.
    pub ranks: Vec<f64>,
    /// Relative error of sums and normaliser.
    pub value_scale: f64,
    /// Relative error of scores.
    pub key_scale: f64,
}

/// A problem whose outputs are to be examined: everything that does not depend on the outputs.
///
/// Holds a softmax weight in float64 for every state and token: 8·rows·heads·tokens bytes.
pub struct Model<'a, T = f32> {
    pub(super) problem: Problem<'a, T>,
    pub(super) tokens: Tokens,
    pub(super) shares: Vec<Shares>,
    pub(super) moments: Moments,
    probable: Probable,
    /// `[states]`: whether the gates hold.
    pub(super) admitted: Vec<bool>,
    /// `[states][v_dim]`: `1/σ²`, 0 in states that do not take part and where σ is 0.
    pub(super) precision: Vec<f64>,
    /// `[states][v_dim]`: the template of the key scale.
    pub(super) key_template: Vec<f64>,
    /// `[tokens]`, without products.
    pub(super) token_filters: Vec<Filter>,
    /// `[blocks]`, without products.
    pub(super) block_filters: Vec<Filter>,
    /// `[ranks]`, then the value scale, then the key scale, without products.
    pub(super) few: Vec<Filter>,
    pub(super) floors: Floors,
}

impl<'a, T: Element> Model<'a, T> {
    /// The model of a problem sharded as `layout`, row `i` seeing `visible[i]`, under `contract`.
    ///
    /// # Errors
    /// [`Underivable`].
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn new(
        problem: &Problem<'a, T>,
        layout: &Layout,
        visible: &[Visible],
        contract: &Contract,
    ) -> Result<Self, Underivable> {
        let passes = Passes::needed_by(contract);
        let moments = Moments::collect(problem, Split::Ranks(layout), visible, passes)?;
        Self::with_moments(problem, layout, visible, contract, moments)
    }

    /// The same from moments that were taken before, of the same problem over the ranks of the same layout.
    ///
    /// # Errors
    /// [`Underivable`].
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn with_moments(
        problem: &Problem<'a, T>,
        layout: &Layout,
        visible: &[Visible],
        contract: &Contract,
        mut moments: Moments,
    ) -> Result<Self, Underivable> {
        problem.check();
        problem.check_visible(visible);
        let tokens = Tokens::of(layout, visible);
        let (mut shares, mut slopes) = (Vec::new(), Vec::new());
        for kv_head in 0..problem.kv_heads {
            let mut held = Shares::of(problem, &tokens, visible, &moments, kv_head);
            slopes.push(held.measure(problem, &tokens, &mut moments));
            shares.push(held);
        }
        let probable = probable(&moments, contract, USUAL_CHANCE)?;
        let floors = floors(&moments, contract)?;
        let (count, ranks) = (tokens.positions.len(), tokens.ranks.len());
        let blocks = tokens.blocks.len();
        let mut model = Self {
            problem: *problem,
            tokens,
            shares,
            admitted: admitted(&moments, &probable, contract),
            precision: vec![0.0; moments.states.len() * problem.v_dim],
            key_template: vec![0.0; moments.states.len() * problem.v_dim],
            token_filters: vec![Filter::default(); count],
            block_filters: vec![Filter::default(); blocks],
            few: vec![Filter::default(); ranks + 2],
            moments,
            probable,
            floors,
        };
        model.set_templates(&slopes);
        model.set_energies(contract);
        Ok(model)
    }

    /// The moments of the problem.
    pub fn moments(&self) -> &Moments {
        &self.moments
    }

    /// The probable bound and σ of every element.
    pub fn probable(&self) -> &Probable {
        &self.probable
    }

    /// `[rows, heads]`: whether a state takes part.
    pub fn admitted(&self) -> &[bool] {
        &self.admitted
    }

    /// Looks at an output, `[rows, heads, v_dim]`. `None` where a number is not finite.
    ///
    /// # Panics
    /// `observed` has another length.
    pub fn examine(&self, observed: &[f64]) -> Option<Examination> {
        Residual::of(self, observed).map(|residual| residual.examine(self))
    }

    /// Elements of one state.
    pub(super) fn elements(&self, state: usize) -> std::ops::Range<usize> {
        state * self.problem.v_dim..(state + 1) * self.problem.v_dim
    }

    /// `1/σ²`, and the template of the key scale: `Σ p·t·v − (Σ p·t)·o`.
    fn set_templates(&mut self, slopes: &[Vec<f64>]) {
        let width = self.problem.v_dim.next_multiple_of(LANES);
        for (shares, sums) in self.shares.iter().zip(slopes) {
            for (place, &state) in shares.states.iter().enumerate() {
                let range = self.elements(state);
                let out = &self.moments.states[state].out;
                let mean = shares.slope_sum(place);
                for (d, at) in range.enumerate() {
                    let sigma = self.probable.sigma[at];
                    if self.admitted[state] && sigma > 0.0 {
                        self.precision[at] = 1.0 / (sigma * sigma);
                    }
                    self.key_template[at] = sums[place * width + d] - mean * out[d];
                }
            }
        }
    }

    /// Energies and coherent variances of all templates.
    fn set_energies(&mut self, contract: &Contract) {
        let unit = UNIFORM_CELL * contract.u_p();
        let (mut tokens, mut blocks, mut few) = (Vec::new(), Vec::new(), Vec::new());
        for shares in &self.shares {
            let energies = Energies::of(self, shares, unit);
            tokens.push(energies.tokens);
            blocks.push(energies.blocks);
            few.push(energies.few);
        }
        let add = |to: &mut Vec<Filter>, all: &[Vec<Filter>]| {
            for filters in all {
                to.iter_mut().zip(filters).for_each(|(to, from)| *to = to.and(*from));
            }
        };
        add(&mut self.token_filters, &tokens);
        add(&mut self.block_filters, &blocks);
        add(&mut self.few, &few);
    }

    /// `[ranks + 2][v_dim]`: the templates of the ranks, of the value scale and of the key scale in one state.
    pub(super) fn few_templates(&self, state: usize) -> Vec<Vec<f64>> {
        let State { out, parts, .. } = &self.moments.states[state];
        let of_rank = |part: &crate::moments::Part| -> Vec<f64> {
            part.out.iter().zip(out).map(|(own, out)| part.weight * (own - out)).collect()
        };
        let mut templates: Vec<Vec<f64>> = parts.iter().map(of_rank).collect();
        templates.push(out.clone());
        templates.push(self.key_template[self.elements(state)].to_vec());
        templates
    }
}

/// States that take part: a token is visible, no rank holds a single one or one that outweighs all others, the gates of the
/// probable bound hold, scores are distinct.
fn admitted(moments: &Moments, probable: &Probable, contract: &Contract) -> Vec<bool> {
    let unit = contract.partial.unit_roundoff().max(contract.output.unit_roundoff());
    let distinct = |state: &State| {
        state.parts.iter().filter(|part| part.tokens > 0).all(|part| {
            part.tokens > 1
                && 1.0 - part.peak >= LEAST_BESIDE_PEAK * unit
                && part.statistics.as_ref().is_some_and(|statistics| statistics.distinct >= MIN_DISTINCT)
        })
    };
    let states = moments.states.iter().zip(&probable.gates_hold);
    states.map(|(state, gates_hold)| state.tokens > 0 && *gates_hold && distinct(state)).collect()
}

fn floors(moments: &Moments, contract: &Contract) -> Result<Floors, Underivable> {
    let mut floors = Floors { ranks: vec![0.0; moments.parts], value_scale: 0.0, key_scale: 0.0 };
    let score_error = gamma(moments.qk_dim, contract.u_acc);
    for (index, state) in moments.states.iter().enumerate().filter(|(_, state)| state.tokens > 0) {
        let bound = bound_state(moments, contract, index / moments.heads, index % moments.heads)?;
        for (floor, part) in floors.ranks.iter_mut().zip(&bound.parts) {
            let own = part.practical_lse_bound.unwrap_or(part.lse_bound);
            *floor = floor.max(own + bound.merge_weight_error);
        }
        let depth = contract.depth_for(state.tokens);
        let sums = gamma(depth, contract.u_acc) + gamma(depth, U32) + 3.0 * U32;
        let normaliser = if contract.l_rounded { contract.u_p() } else { 0.0 };
        let unnormalised = (2.0 * bound.merge_weight_error).exp_m1();
        floors.value_scale = floors.value_scale.max(sums + normaliser + unnormalised);
        let mean = |power: [usize; 2]| -> f64 {
            state.parts.iter().map(|part| part.weight * part.powers[power[0]][power[1]]).sum()
        };
        let relative = score_error * mean([1, 0]) / mean([0, 1]).max(f64::MIN_POSITIVE);
        floors.key_scale = floors.key_scale.max(relative + 5.0 * U32);
    }
    Ok(floors)
}

/// Energies over the states of one KV head.
struct Energies {
    tokens: Vec<Filter>,
    blocks: Vec<Filter>,
    few: Vec<Filter>,
}

impl Energies {
    fn of<T: Element>(model: &Model<T>, shares: &Shares, unit: f64) -> Self {
        let width = model.problem.v_dim.next_multiple_of(LANES);
        let count = model.tokens.positions.len();
        let vectors = Whitened::of(model, shares, width);
        let runs = model.tokens.each_run(|rank, blocks| {
            blocks
                .iter()
                .flat_map(|block| tiles(block.clone()))
                .map(|tile| vectors.tile(model, shares, rank, tile, unit))
                .collect::<Vec<_>>()
        });
        let (mut tokens, mut blocks) = (Vec::with_capacity(count), Vec::new());
        for tile in runs.into_iter().flatten() {
            blocks.push(tile.block);
            tokens.extend(tile.tokens);
        }
        let few = shares
            .states
            .par_iter()
            .enumerate()
            .map(|(place, state)| few_energies(model, shares, (place, *state), unit))
            .collect::<Vec<_>>();
        let mut sums = vec![Filter::default(); model.few.len()];
        for filters in few {
            sums.iter_mut().zip(filters).for_each(|(to, from)| *to = to.and(from));
        }
        Self { tokens, blocks, few: sums }
    }
}

/// Vectors of every state that a pass over the values is multiplied with.
struct Whitened {
    width: usize,
    /// `[states][width]`: `1/σ²`.
    precision: Vec<f64>,
    /// `[states][width]`: `o/σ²`.
    out: Vec<f64>,
    /// `[states]`: `Σ o²/σ²`.
    out_square: Vec<f64>,
}

/// What one tile of tokens adds.
struct TileEnergies {
    tokens: Vec<Filter>,
    block: Filter,
}

impl Whitened {
    fn of<T: Element>(model: &Model<T>, shares: &Shares, width: usize) -> Self {
        let states = shares.states.len();
        let mut whitened = Self {
            width,
            precision: vec![0.0; states * width],
            out: vec![0.0; states * width],
            out_square: vec![0.0; states],
        };
        for (place, &state) in shares.states.iter().enumerate() {
            let precision = &model.precision[model.elements(state)];
            for (d, (precision, out)) in precision.iter().zip(&model.moments.states[state].out).enumerate() {
                whitened.precision[place * width + d] = *precision;
                whitened.out[place * width + d] = precision * out;
                whitened.out_square[place] += precision * out * out;
            }
        }
        whitened
    }

    /// A tile holds one block.
    fn tile<T: Element>(
        &self,
        model: &Model<T>,
        shares: &Shares,
        rank: usize,
        tile: std::ops::Range<usize>,
        unit: f64,
    ) -> TileEnergies {
        let (width, states, count) = (self.width, shares.states.len(), model.tokens.positions.len());
        let mut rows = vec![0.0; TILE * width];
        let positions = &model.tokens.positions[tile.clone()];
        load(positions.iter().map(|&at| model.problem.value_at(at, shares.kv_head)), width, &mut rows);
        let mut with_out = vec![0.0; states * TILE];
        dots(filled(&rows, tile.len(), width), &self.out, width, &mut with_out);
        let mut weights = vec![0.0; states * TILE];
        for (place, to) in weights.chunks_exact_mut(TILE).enumerate() {
            to[..tile.len()].copy_from_slice(&shares.weights_of(place, count)[tile.clone()]);
        }
        let mut sums = vec![0.0; states * width];
        add_weighted(&weights, filled(&rows, tile.len(), width), width, &mut sums);
        rows.iter_mut().for_each(|v| *v *= *v);
        let mut squares = vec![0.0; states * TILE];
        dots(filled(&rows, tile.len(), width), &self.precision, width, &mut squares);
        let mut energies =
            TileEnergies { tokens: vec![Filter::default(); tile.len()], block: Filter::default() };
        for place in 0..states {
            let (sums, peak) = (&sums[place * width..][..width], shares.peak(place, rank));
            let mut share = 0.0;
            for (row, filter) in energies.tokens.iter_mut().enumerate() {
                let at = place * TILE + row;
                let (p, own) = (weights[at], squares[at] - with_out[at]);
                share += p;
                filter.energy += p * p * (own - with_out[at] + self.out_square[place]).max(0.0);
                if peak != Some(tile.start + row) {
                    filter.coherent += (unit * p * p * own).powi(2);
                }
            }
            let whitened = self.precision[place * width..][..width].iter().zip(sums);
            let square: f64 = whitened.map(|(precision, sum)| precision * sum * sum).sum();
            let cross = dot(&self.out[place * width..][..width], sums);
            energies.block.energy +=
                (square - 2.0 * share * cross + share * share * self.out_square[place]).max(0.0);
        }
        energies.block.coherent = energies.tokens.iter().map(|filter| filter.coherent).sum();
        energies
    }
}

/// Energies of the templates of ranks and scales in one state.
fn few_energies<T: Element>(
    model: &Model<T>,
    shares: &Shares,
    (place, state): (usize, usize),
    unit: f64,
) -> Vec<Filter> {
    if !model.admitted[state] {
        return vec![Filter::default(); model.few.len()];
    }
    let precision = &model.precision[model.elements(state)];
    let weights = shares.weights_of(place, model.tokens.positions.len());
    let peaks: Vec<Option<usize>> =
        (0..model.tokens.ranks.len()).map(|rank| shares.peak(place, rank)).collect();
    let heavy: Vec<usize> = (0..weights.len())
        .filter(|index| weights[*index] >= HEAVY && !peaks.contains(&Some(*index)))
        .collect();
    model
        .few_templates(state)
        .iter()
        .map(|template| {
            let whitened: Vec<f64> = template.iter().zip(precision).map(|(t, p)| t * p).collect();
            let mut coherent = 0.0;
            for &index in &heavy {
                let value = model.problem.value_at(model.tokens.positions[index], shares.kv_head);
                let (mut sum, mut own) = (0.0, 0.0);
                for (w, v) in whitened.iter().zip(value) {
                    let term = w * Into::<f64>::into(*v);
                    sum += term;
                    own += term * term;
                }
                // the sum of squares is in σ already
                coherent += (unit * weights[index]).powi(2) * (sum * sum - own);
            }
            Filter { product: 0.0, energy: dot(template, &whitened), coherent: coherent.max(0.0) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plain::{Platform, Values, score};
    use shardcheck_formats::contract::Merge;
    use shardcheck_formats::recipe::Counter;

    #[test]
    fn energies_of_tokens_and_blocks_are_those_of_their_templates() {
        let mut random = Counter::new(61, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (heads, qk_dim, v_dim, tokens) = (2, 16, 12, 50);
        let (query, key, value) = (draw(2 * heads * qk_dim), draw(tokens * qk_dim), draw(tokens * v_dim));
        let problem = Problem::new(heads, 1, qk_dim, v_dim, 0.25, &query, &key, Values::Separate(&value));
        let (layout, visible) = (Layout::new(2, 1, 1).unwrap(), Visible::causal(tokens, 2));
        let contract = Contract { u_acc: U32, ..Contract::bf16_default(Merge::A2a) };
        let model = Model::new(&problem, &layout, &visible, &contract).unwrap();
        assert!(model.admitted.iter().all(|admitted| *admitted));
        let unit = UNIFORM_CELL * contract.u_p();
        let weight = |state: usize, position: usize| {
            let seen = visible[state / heads].contains(position);
            let score = score::<Platform, f32>(&problem, state / heads, state % heads, position);
            if seen { (score - model.moments.states[state].lse).exp() } else { 0.0 }
        };
        let peak = |state: usize, rank: usize| {
            let held = (0..tokens).filter(|position| layout.owner(*position) == rank);
            held.max_by(|a, b| weight(state, *a).total_cmp(&weight(state, *b))).unwrap()
        };
        // Σ_d f(v, o, 1/σ²) of one state and token
        let over = |state: usize, position: usize, f: &dyn Fn(f64, f64, f64) -> f64| -> f64 {
            let out = &model.moments.states[state].out;
            let precision = &model.precision[model.elements(state)];
            let value = problem.value_at(position, 0);
            (0..v_dim).map(|d| f(f64::from(value[d]), out[d], precision[d])).sum()
        };
        for (index, &position) in model.tokens.positions.iter().enumerate() {
            let (mut energy, mut coherent) = (0.0, 0.0);
            for state in 0..2 * heads {
                let p = weight(state, position);
                energy += over(state, position, &|v, o, precision| (p * (v - o)).powi(2) * precision);
                if peak(state, layout.owner(position)) != position {
                    let own = over(state, position, &|v, o, precision| v * (v - o) * precision);
                    coherent += (unit * p * p * own).powi(2);
                }
            }
            let filter = model.token_filters[index];
            approx::assert_relative_eq!(filter.energy, energy, max_relative = 1e-9);
            approx::assert_relative_eq!(filter.coherent, coherent, max_relative = 1e-9);
        }
        for (block, range) in model.tokens.blocks.iter().enumerate() {
            let positions = &model.tokens.positions[range.clone()];
            let mut energy = 0.0;
            for state in 0..2 * heads {
                let (out, precision) =
                    (&model.moments.states[state].out, &model.precision[model.elements(state)]);
                for d in 0..v_dim {
                    let template = |&position: &usize| {
                        weight(state, position) * (f64::from(problem.value_at(position, 0)[d]) - out[d])
                    };
                    energy += positions.iter().map(template).sum::<f64>().powi(2) * precision[d];
                }
            }
            approx::assert_relative_eq!(model.block_filters[block].energy, energy, max_relative = 1e-9);
            let coherent: f64 = model.token_filters[range.clone()].iter().map(|filter| filter.coherent).sum();
            approx::assert_relative_eq!(model.block_filters[block].coherent, coherent, max_relative = 1e-12);
        }
        assert!(model.tokens.blocks.len() >= 4, "{:?}", model.tokens.blocks);
    }
}
