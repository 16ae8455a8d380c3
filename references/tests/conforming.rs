//! A conforming float32 engine against the certified bound: never a violation, and the bound is attained.

mod simulated;

use shardcheck_formats::contract::{Contract, Depth, Merge};
use shardcheck_formats::dtype::Dtype;
use shardcheck_formats::recipe::{Counter, Distribution, Recipe};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{
    Certified, MergeInputs, ProjectionOrder, UpProjection, certify, certify_chain, certify_merge,
    certify_projected, interval, ratio,
};
use shardcheck_references::exp::Fixed;
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::Moments;
use shardcheck_references::probable::{USUAL_CHANCE, probable};
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;
use simulated::{Habits, Returned, attend, attend_chain, merge, project, round_to};

#[derive(Debug, Clone, Copy)]
enum Inputs {
    Gauss,
    Heavy,
    LargeLogits,
    RepeatedKeys,
    CancellingQuery,
    ConstantValue,
}

const INPUTS: [Inputs; 6] = [
    Inputs::Gauss,
    Inputs::Heavy,
    Inputs::LargeLogits,
    Inputs::RepeatedKeys,
    Inputs::CancellingQuery,
    Inputs::ConstantValue,
];

fn tensor(seed: u64, stream: u32, distribution: Distribution, shape: Vec<usize>) -> Vec<f32> {
    let recipe = Recipe { seed, stream, distribution, dtype: Dtype::Bf16, shape, exponent: 0 };
    let mut values = vec![0.0; recipe.len() as usize];
    recipe.fill(0, &mut values);
    values
}

struct Tensors {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

fn tensors(
    inputs: Inputs,
    seed: u64,
    rows: usize,
    heads: usize,
    tokens: usize,
    dims: (usize, usize),
) -> Tensors {
    let (qk_dim, v_dim) = dims;
    let distribution =
        if matches!(inputs, Inputs::Heavy) { Distribution::HeavyTail } else { Distribution::Gaussian };
    let mut made = Tensors {
        query: tensor(seed, 0, distribution, vec![rows, heads, qk_dim]),
        key: tensor(seed, 1, distribution, vec![tokens, 1, qk_dim]),
        value: tensor(seed, 2, distribution, vec![tokens, 1, v_dim]),
    };
    match inputs {
        Inputs::Gauss | Inputs::Heavy => {}
        Inputs::LargeLogits => made.query.iter_mut().for_each(|q| *q *= 6.0),
        Inputs::RepeatedKeys => {
            for (index, key) in made.key.clone().chunks(qk_dim).enumerate() {
                let source = index % 3 * qk_dim;
                if source + qk_dim <= made.key.len() && index >= 3 {
                    made.key.copy_within(source..source + qk_dim, index * key.len());
                }
            }
        }
        Inputs::CancellingQuery => {
            for query in made.query.chunks_mut(qk_dim) {
                for i in 0..qk_dim / 2 {
                    query[i + qk_dim / 2] = -query[i];
                }
            }
            made.key.iter_mut().for_each(|k| *k = shardcheck_formats::single::round_bf16(*k + 8.0));
        }
        Inputs::ConstantValue => made.value.fill(1.5),
    }
    made
}

/// How much of its bounds a run uses, and how many elements it has.
#[derive(Debug, Default)]
struct Used {
    elements: usize,
    outside: usize,
    out: f64,
    partial: f64,
    lse: f64,
    practical: f64,
}

impl Used {
    fn add(&mut self, returned: &Returned, certified: &Certified, contract: &Contract) {
        for ((seen, out), pre) in returned.out.iter().zip(&certified.out).zip(&certified.pre) {
            let (lo, hi) = interval(*out, *pre, contract.output);
            let used = ratio(*seen, *out, lo, hi);
            self.elements += 1;
            self.outside += usize::from(!(lo <= *seen && *seen <= hi));
            self.out = self.out.max(used);
        }
        for (seen, certified) in returned.partials.iter().zip(&certified.partials) {
            let states = certified.lse.iter().zip(&seen.1).zip(&certified.lse_bound).enumerate();
            for (state, ((exact, seen_lse), bound)) in states {
                if *exact == f64::NEG_INFINITY {
                    assert_eq!(*seen_lse, f64::NEG_INFINITY);
                    continue;
                }
                self.lse = self.lse.max((seen_lse - exact).abs() / bound);
                let width = certified.out.len() / certified.lse.len();
                for d in state * width..(state + 1) * width {
                    self.partial = self.partial.max((seen.0[d] - certified.out[d]).abs() / certified.pre[d]);
                }
            }
        }
        for (state, (seen, exact)) in returned.lse.iter().zip(&certified.lse).enumerate() {
            if *exact == f64::NEG_INFINITY {
                assert_eq!(*seen, f64::NEG_INFINITY);
                continue;
            }
            self.lse = self.lse.max((seen - exact).abs() / certified.lse_bound[state]);
            if let Some(bound) = certified.practical_lse_bound[state] {
                self.practical = self.practical.max((seen - exact).abs() / bound);
            }
        }
    }
}

fn contract(random: &mut Counter) -> Contract {
    // f16 is a way to be of a whole engine
    let merge = [Merge::A2a, Merge::AgRsF32, Merge::AgRsBf16][random.below(3) as usize];
    let mut contract = Contract::bf16_default(merge);
    contract.tile_min = 16;
    match random.below(7) {
        0 => contract.l_rounded = true,
        1 => contract.depth = Depth::Any,
        2 => contract.p_dtype = None,
        3 => {
            contract.p_dtype = Some(Dtype::E4m3fn);
            contract.p_floor = 2f64.powi(-10);
        }
        4 => contract.partial = Dtype::F32,
        5 => contract = contract.in_f16(),
        _ => {}
    }
    contract
}

#[test]
fn a_conforming_engine_is_never_outside_in_a_million_elements() {
    let mut used = Used::default();
    let mut random = Counter::new(20, 0);
    let mut run = 0;
    while used.elements < 1_050_000 {
        run += 1;
        let inputs = INPUTS[run % INPUTS.len()];
        let (rows, heads) = (2, 8);
        let (qk_dim, v_dim) = [(24, 32), (64, 64), (40, 128)][random.below(3) as usize];
        let tokens = [1, 2, 3, 7, 16, 37, 64, 130, 257, 600][random.below(10) as usize];
        let world = [1, 2, 3, 4, 8][random.below(5) as usize];
        let interleave = [1, 16][random.below(2) as usize];
        let made = tensors(inputs, run as u64, rows, heads, tokens, (qk_dim, v_dim));
        let scale = (qk_dim as f64).powf(-0.5);
        let values = Values::Separate(&made.value);
        let problem = Problem::new(heads, 1, qk_dim, v_dim, scale, &made.query, &made.key, values);
        let layout = Layout::new(world, interleave, interleave).unwrap();
        let visible = Visible::causal(tokens, rows);
        let contract = contract(&mut random);
        let habits = Habits {
            tile: [16, 32, 64, 128][random.below(4) as usize],
            truncate: random.below(2) == 0,
            forgets: None,
        };
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        let returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
        used.add(&returned, &certified, &contract);
        assert_eq!(used.outside, 0, "{inputs:?} n={tokens} W={world} S={interleave} {contract:?} {habits:?}");
        assert!(used.partial <= 1.0, "{used:?} {inputs:?} n={tokens} W={world} {contract:?} {habits:?}");
        assert!(used.lse <= 1.0, "{used:?} {inputs:?} n={tokens} W={world} {contract:?} {habits:?}");
        assert!(used.practical <= 1.0, "{used:?} {inputs:?} n={tokens} W={world} {contract:?} {habits:?}");
    }
    assert!(used.out > 0.9, "the intervals are never nearly used: {used:?}");
    eprintln!("{used:?} in {run} runs");
}

#[test]
fn soft_caps_sinks_and_windows_are_covered_too() {
    let mut used = Used::default();
    let mut random = Counter::new(24, 0);
    for run in 0..200 {
        let made = tensors(INPUTS[run % INPUTS.len()], 4000 + run as u64, 3, 8, 150, (40, 32));
        let values = Values::Separate(&made.value);
        let mut problem = Problem::new(8, 1, 40, 32, 40f64.powf(-0.5), &made.query, &made.key, values);
        let sink: Vec<f64> = (0..8).map(|_| f64::from(random.gaussian() as f32) * 3.0).collect();
        problem.sink = (run % 3 != 0).then_some(sink.as_slice());
        problem.softcap = (run % 2 == 0).then_some(5.0);
        let visible =
            if run % 5 == 0 { Visible::sliding_window(150, 3, 20) } else { Visible::causal(150, 3) };
        let layout = Layout::new([1, 3, 8][random.below(3) as usize], 1, 1).unwrap();
        let contract = contract(&mut random);
        let habits = Habits { tile: 32, truncate: run % 2 == 0, forgets: None };
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        let mut returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
        if layout.world() == 1 && problem.sink.is_some() {
            // what stands for a partial there has taken the sink in already
            returned.partials.clear();
        }
        used.add(&returned, &certified, &contract);
        assert_eq!(used.outside, 0, "run {run}: {contract:?} {habits:?}");
        let most = used.partial.max(used.lse).max(used.practical);
        assert!(most <= 1.0, "run {run}: {used:?} {contract:?}");
    }
    assert!(used.elements > 100_000 && used.out > 0.9, "{used:?}");
}

#[test]
fn a_truncating_accumulator_keeps_the_practical_lse_bound_or_its_gate_is_shut() {
    // 576 dimensions, where truncation has the most steps to go wrong in
    let mut random = Counter::new(25, 0);
    for (inputs, gate_open) in
        [(Inputs::Gauss, true), (Inputs::Heavy, true), (Inputs::CancellingQuery, false)]
    {
        let made = tensors(inputs, 77, 1, 2, 1500, (576, 8));
        let values = Values::Separate(&made.value);
        let problem = Problem::new(2, 1, 576, 8, 576f64.powf(-0.5), &made.query, &made.key, values);
        let (layout, visible) = (Layout::new(2, 1, 1).unwrap(), [Visible::Prefix(1500)]);
        let contract = Contract::bf16_default(Merge::A2a);
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        assert!(certified.practical_lse_bound.iter().all(|bound| bound.is_some() == gate_open), "{inputs:?}");
        let habits = Habits { tile: 64, truncate: true, forgets: None };
        let returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
        let mut used = Used::default();
        used.add(&returned, &certified, &contract);
        assert!(used.outside == 0 && used.lse <= 1.0 && used.practical <= 1.0, "{inputs:?}: {used:?}");
    }
}

#[test]
fn the_probable_bound_is_not_broken_where_its_gates_hold_and_its_deviation_is_about_right() {
    let mut random = Counter::new(26, 0);
    let (mut squares, mut elements) = (0.0, 0);
    for run in 0..24 {
        let made = tensors(Inputs::Gauss, 5000 + run, 1, 8, 1024, (64, 64));
        let values = Values::Separate(&made.value);
        let problem = Problem::new(8, 1, 64, 64, 0.125, &made.query, &made.key, values);
        let layout = Layout::new([1, 4, 8][run as usize % 3], 1, 1).unwrap();
        let visible = [Visible::Prefix(1024)];
        let contract =
            Contract { u_acc: 2f64.powi(-24), ..Contract::bf16_default(Merge::ALL[run as usize / 3 % 4]) };
        let moments = Moments::collect_with::<Fixed, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
        let probable = probable(&moments, &contract, USUAL_CHANCE).unwrap();
        assert!(probable.gates_hold.iter().all(|holds| *holds));
        let habits = Habits { tile: 64, truncate: false, forgets: None };
        let returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
        for (index, seen) in returned.out.iter().enumerate() {
            let out = moments.states[index / 64].out[index % 64];
            let (lo, hi) = interval(out, probable.pre[index], contract.output);
            assert!(lo <= *seen && *seen <= hi, "{seen} not in {lo}..{hi}");
            squares += ((seen - out) / probable.sigma[index]).powi(2);
            elements += 1;
        }
    }
    let mean = squares / f64::from(elements);
    assert!((0.4..1.5).contains(&mean), "mean squared deviation {mean}");
}

#[test]
fn a_conforming_chunk_chain_is_never_outside() {
    let mut used = Used::default();
    let mut random = Counter::new(21, 0);
    for run in 0..120 {
        let made = tensors(INPUTS[run % INPUTS.len()], 1000 + run as u64, 2, 8, 400, (40, 64));
        let values = Values::Separate(&made.value);
        let problem = Problem::new(8, 1, 40, 64, 40f64.powf(-0.5), &made.query, &made.key, values);
        let chunks: Vec<usize> = (0..1 + random.below(7)).map(|_| random.below(150) as usize).collect();
        let visible = Visible::causal(400, 2);
        let mut contract = contract(&mut random);
        if run % 4 == 0 {
            contract.output = Dtype::F32;
        }
        let habits = Habits { tile: 64, truncate: run % 2 == 0, forgets: None };
        let certified = certify_chain(&problem, &chunks, &visible, &contract, false).unwrap();
        let returned = attend_chain(&problem, &chunks, &visible, &contract, habits, &mut random);
        used.add(&returned, &certified, &contract);
        assert_eq!(used.outside, 0, "{chunks:?} {contract:?} {habits:?}");
        assert!(used.partial <= 1.0 && used.lse <= 1.0, "{used:?} {chunks:?} {contract:?} {habits:?}");
        assert!(used.practical <= 1.0, "{used:?} {chunks:?} {contract:?} {habits:?}");
    }
    assert!(used.elements > 100_000 && used.out > 0.5, "{used:?}");
}

#[test]
fn a_conforming_merge_of_given_partials_is_never_outside() {
    let mut random = Counter::new(23, 0);
    let (mut elements, mut largest) = (0, 0f64);
    for run in 0..600 {
        let parts = 1 + random.below(8) as usize;
        let (v_dim, spread) = (16, [0.5, 5.0, 80.0][run % 3]);
        let mut contract = Contract::bf16_default(Merge::ALL[random.below(4) as usize]);
        contract.output = [Dtype::Bf16, Dtype::F32, Dtype::F16][random.below(3) as usize];
        let given: Vec<(Vec<f32>, f32)> = (0..parts)
            .map(|_| {
                let out = (0..v_dim).map(|_| random.gaussian() as f32).collect();
                let empty = random.below(6) == 0;
                (out, if empty { f32::NEG_INFINITY } else { (random.gaussian() * spread) as f32 })
            })
            .map(|(out, lse)| (if lse == f32::NEG_INFINITY { vec![f32::NAN; v_dim] } else { out }, lse))
            .collect();
        let out: Vec<f64> = given.iter().flat_map(|part| &part.0).map(|x| f64::from(*x)).collect();
        let lse: Vec<f64> = given.iter().map(|part| f64::from(part.1)).collect();
        let inputs = MergeInputs { rows: 1, heads: 1, v_dim, out: &out, lse: &lse };
        let certified = certify_merge(&inputs, &contract, false).unwrap();
        let (seen, seen_lse) = if parts == 1 && given[0].1.is_finite() {
            given[0].clone()
        } else {
            merge(&contract, &given, &mut random)
        };
        for ((seen, out), pre) in seen.iter().zip(&certified.out).zip(&certified.pre) {
            let (lo, hi) = interval(*out, *pre, contract.output);
            let seen = f64::from(round_to(contract.output, *seen));
            assert!(lo <= seen && seen <= hi, "{seen} not in {lo}..{hi}: {contract:?} {given:?}");
            if contract.output == Dtype::F32 && *pre > 0.0 {
                largest = largest.max((seen - out).abs() / pre);
            }
            elements += 1;
        }
        let exact = certified.lse[0];
        assert!(
            f64::from(seen_lse) == exact || (f64::from(seen_lse) - exact).abs() <= certified.lse_bound[0]
        );
    }
    assert!(elements >= 9_600 && largest > 0.3, "{elements} {largest}");
}

#[test]
fn a_conforming_up_projection_is_never_outside_in_either_order() {
    let mut random = Counter::new(22, 0);
    let (heads, latent, v_dim) = (4, 64, 32);
    let (mut elements, mut largest) = (0, [0f64; 2]);
    for run in 0..120 {
        let made = tensors(INPUTS[run % INPUTS.len()], 2000 + run as u64, 1, heads, 200, (80, latent));
        let weights = tensor(3000 + run as u64, 3, Distribution::Gaussian, vec![heads, latent, v_dim]);
        let problem =
            Problem::new(heads, 1, 80, latent, 80f64.powf(-0.5), &made.query, &made.key, Values::KeyPrefix);
        let world = [1, 2, 3, 8][random.below(4) as usize];
        let layout = Layout::new(world, 1, 1).unwrap();
        let visible = [Visible::Prefix([3, 60, 200][random.below(3) as usize])];
        let mut contract = contract(&mut random);
        contract.output = Dtype::Bf16;
        let habits = Habits { tile: 64, truncate: run % 2 == 0, forgets: None };
        let projection = UpProjection { weights: &weights, v_dim };
        let returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
        for (which, order) in ProjectionOrder::ALL.into_iter().enumerate() {
            let both =
                certify_projected(&problem, Split::Ranks(&layout), &visible, &contract, &projection, order)
                    .unwrap();
            let seen = match order {
                ProjectionOrder::AfterMerge => {
                    project(&returned.out, &weights, latent, v_dim, habits.truncate)
                }
                ProjectionOrder::BeforeMerge if world == 1 => continue,
                ProjectionOrder::BeforeMerge => {
                    let projected: Vec<Vec<f32>> = returned
                        .partials
                        .iter()
                        .map(|(out, _)| project(out, &weights, latent, v_dim, habits.truncate))
                        .map(|y| y.into_iter().map(|y| round_to(contract.partial, y)).collect())
                        .collect();
                    (0..heads)
                        .flat_map(|head| {
                            let parts: Vec<(Vec<f32>, f32)> = (0..world)
                                .map(|rank| {
                                    let y = projected[rank][head * v_dim..(head + 1) * v_dim].to_vec();
                                    (y, returned.partials[rank].1[head] as f32)
                                })
                                .collect();
                            merge(&contract, &parts, &mut random).0
                        })
                        .collect()
                }
            };
            for ((seen, out), pre) in seen.iter().zip(&both.projected.out).zip(&both.projected.pre) {
                let (lo, hi) = interval(*out, *pre, contract.output);
                let seen = f64::from(round_to(contract.output, *seen));
                assert!(lo <= seen && seen <= hi, "{order} run {run} W={world}: {seen} not in {lo}..{hi}");
                largest[which] = largest[which].max((seen - out).abs() / pre);
                elements += 1;
            }
        }
    }
    assert!(elements > 20_000 && largest.iter().all(|used| *used > 0.05), "{elements} {largest:?}");
}

/// One row whose probabilities all round up by 0.995 of the unit roundoff, and whose values all have one sign.
#[test]
fn the_bound_is_attained_when_all_probabilities_round_the_same_way() {
    for tokens in [65usize, 257, 1025] {
        let mut contract = Contract::bf16_default(Merge::A2a);
        contract.output = Dtype::F32; // so that the final rounding hides nothing
        let probability: f64 = 0.5 * (1.0 + 2f64.powi(-8) + 2f64.powi(-14));
        let mut key = vec![probability.ln() as f32; tokens];
        let mut value = vec![1f32; tokens];
        (key[0], value[0]) = (0.0, 0.0); // the largest, exactly 1, without a value
        let query = [1f32];
        let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let (layout, visible) = (Layout::single(), [Visible::Prefix(tokens)]);
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        let habits = Habits { tile: 2048, truncate: false, forgets: None };
        let returned = attend(&problem, &layout, &visible, &contract, habits, &mut Counter::new(1, 0));
        let used = (returned.out[0] - certified.out[0]).abs() / certified.pre[0];
        assert!((0.95..=1.0).contains(&used), "{used} at {tokens} tokens");
    }
}

#[test]
fn a_dropped_token_is_outside_at_small_context() {
    for (tokens, world) in [(16, 1), (37, 2), (64, 4), (100, 8)] {
        let made = tensors(Inputs::Gauss, 7 + tokens as u64, 1, 8, tokens, (64, 64));
        let values = Values::Separate(&made.value);
        let problem = Problem::new(8, 1, 64, 64, 0.125, &made.query, &made.key, values);
        let layout = Layout::new(world, 1, 1).unwrap();
        let visible = [Visible::Prefix(tokens)];
        let contract = Contract::bf16_default(Merge::A2a);
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        let mut random = Counter::new(3, 0);
        for forgets in [None, Some(0), Some(1)] {
            let habits = Habits { tile: 32, truncate: false, forgets };
            let returned = attend(&problem, &layout, &visible, &contract, habits, &mut random);
            let mut used = Used::default();
            used.add(&returned, &certified, &contract);
            assert_eq!(used.outside > 0, forgets.is_some(), "{forgets:?} of {tokens}: {used:?}");
            assert_eq!(used.lse > 1.0, forgets.is_some(), "{forgets:?} of {tokens}: {used:?}");
        }
    }
}
