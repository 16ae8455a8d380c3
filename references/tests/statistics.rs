//! What the residual of a whole output says: nothing of a conforming engine, and of a faulty one which token or rank.

#[expect(dead_code, reason = "the chain and the projection are for other tests")]
mod simulated;

use shardcheck_formats::Dtype;
use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::recipe::{Counter, Distribution, Recipe};
use shardcheck_formats::single::round_bf16;
use shardcheck_references::attention::plain::{Platform, Problem, Values};
use shardcheck_references::layout::Layout;
use shardcheck_references::moments::Moments;
use shardcheck_references::split::Split;
use shardcheck_references::statistics::{Alarm, Detector, Examination, Model};
use shardcheck_references::visibility::Visible;
use simulated::{Habits, attend, merge};

const ROWS: usize = 3;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const QK_DIM: usize = 64;
const V_DIM: usize = 128;
const HABITS: Habits = Habits { tile: 64, truncate: false, forgets: None };

fn tensor(seed: u64, stream: u32, distribution: Distribution, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    Recipe { seed, stream, distribution, dtype: Dtype::Bf16, shape: vec![count], exponent: 0 }
        .fill(0, &mut values);
    values
}

/// Inputs of a verification step over `tokens` tokens.
#[derive(Clone)]
struct Inputs {
    tokens: usize,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

impl Inputs {
    fn drawn(seed: u64, tokens: usize, distribution: Distribution) -> Self {
        Self {
            tokens,
            query: tensor(seed, 0, distribution, ROWS * HEADS * QK_DIM),
            key: tensor(seed, 1, distribution, tokens * KV_HEADS * QK_DIM),
            value: tensor(seed, 2, distribution, tokens * KV_HEADS * V_DIM),
        }
    }

    fn gauss(seed: u64, tokens: usize) -> Self {
        Self::drawn(seed, tokens, Distribution::Gaussian)
    }

    fn problem(&self) -> Problem<'_> {
        let values = Values::Separate(&self.value);
        Problem::new(HEADS, KV_HEADS, QK_DIM, V_DIM, 0.125, &self.query, &self.key, values)
    }

    fn visible(&self) -> Vec<Visible> {
        Visible::causal(self.tokens, ROWS)
    }

    fn examine(&self, layout: &Layout, contract: &Contract, seen: &[f64]) -> Examination {
        let model = Model::new(&self.problem(), layout, &self.visible(), contract).unwrap();
        model.examine(seen).unwrap()
    }
}

fn contract(merge: Merge) -> Contract {
    Contract { u_acc: 2f64.powi(-24), ..Contract::bf16_default(merge) }
}

fn of(alarms: &[Alarm], detector: Detector) -> Option<Alarm> {
    alarms.iter().find(|alarm| alarm.detector == detector).copied()
}

#[test]
fn a_conforming_engine_raises_no_alarm_whatever_its_inputs() {
    let mut random = Counter::new(40, 0);
    let (mut scores, mut judged) = (0.0, 0);
    for run in 0..72 {
        let distribution = [Distribution::Gaussian, Distribution::Gaussian, Distribution::HeavyTail][run % 3];
        let mut inputs = Inputs::drawn(100 + run as u64, [7, 128, 1000][run / 3 % 3], distribution);
        match run % 12 {
            4 => inputs.query.iter_mut().for_each(|q| *q *= 6.0),
            7 => {
                inputs.key.iter_mut().enumerate().for_each(|(i, k)| *k = round_bf16(((i % 192) as f32).sin()))
            }
            10 => inputs.value.iter_mut().for_each(|v| *v = round_bf16(1.0 + 0.3 * *v)),
            _ => {}
        }
        let layout = Layout::new([1, 3, 8][run / 9 % 3], 1, 1).unwrap();
        let mut contract = contract(Merge::ALL[run % 4]);
        contract.l_rounded = run % 5 == 0;
        let habits = Habits { truncate: run % 2 == 0, ..HABITS };
        contract.u_acc *= 2.0;
        let returned = attend(&inputs.problem(), &layout, &inputs.visible(), &contract, habits, &mut random);
        let examination = inputs.examine(&layout, &contract, &returned.out);
        assert!(examination.alarms().is_empty(), "run {run}: {:?}", examination.alarms());
        if run % 12 == 7 && inputs.tokens == 1000 {
            assert_eq!(
                (examination.elements, examination.excluded),
                (0, ROWS * HEADS),
                "equal scores shut the gate"
            );
            continue;
        }
        scores += examination.value_scale.score().powi(2) + examination.key_scale.score().powi(2);
        judged += 2;
    }
    let mean = scores / f64::from(judged);
    assert!((0.2..2.0).contains(&mean), "scores are to be about standard normal: mean square {mean}");
}

#[test]
fn a_lost_token_is_named() {
    let mut random = Counter::new(41, 0);
    for (run, (tokens, world)) in
        [(128, 1), (128, 8), (1000, 3), (1000, 8), (1000, 8)].into_iter().enumerate()
    {
        let inputs = Inputs::gauss(200 + run as u64, tokens);
        let layout = Layout::new(world, 1, 1).unwrap();
        let contract = contract([Merge::A2a, Merge::AgRsBf16][run % 2]);
        let lost = random.below(tokens as u64 - 3) as usize;
        let visible: Vec<Visible> = inputs
            .visible()
            .iter()
            .map(|seen| Visible::Set(seen.positions().filter(|position| *position != lost).collect()))
            .collect();
        let returned = attend(&inputs.problem(), &layout, &visible, &contract, HABITS, &mut random);
        let examination = inputs.examine(&layout, &contract, &returned.out);
        let alarm = of(&examination.alarms(), Detector::Token).expect("a lost token raises an alarm");
        assert_eq!((alarm.position, alarm.rank), (Some(lost), Some(layout.owner(lost))), "{alarm}");
        assert!((-1.4..-0.7).contains(&alarm.amplitude.unwrap()), "{alarm}");
        assert!(
            alarm.to_string().starts_with(&format!("token {lost} (rank {}) is missing", layout.owner(lost)))
        );
    }
}

#[test]
fn a_token_that_is_counted_twice_is_named() {
    let mut random = Counter::new(42, 0);
    for tokens in [128, 1000] {
        let inputs = Inputs::gauss(tokens as u64, tokens);
        let (layout, contract) = (Layout::new(4, 1, 1).unwrap(), contract(Merge::A2a));
        let twice = tokens / 3;
        let mut longer = inputs.clone();
        longer.key.extend_from_within(twice * KV_HEADS * QK_DIM..(twice + 1) * KV_HEADS * QK_DIM);
        longer.value.extend_from_within(twice * KV_HEADS * V_DIM..(twice + 1) * KV_HEADS * V_DIM);
        let visible: Vec<Visible> = inputs
            .visible()
            .iter()
            .map(|seen| Visible::Set(seen.positions().chain([tokens]).collect()))
            .collect();
        let returned = attend(&longer.problem(), &layout, &visible, &contract, HABITS, &mut random);
        let alarms = inputs.examine(&layout, &contract, &returned.out).alarms();
        let alarm = of(&alarms, Detector::Token).expect("a doubled token raises an alarm");
        assert_eq!(alarm.position, Some(twice), "{alarm}");
        assert!((0.7..1.4).contains(&alarm.amplitude.unwrap()), "{alarm}");
    }
}

#[test]
fn a_stale_block_is_named() {
    let mut random = Counter::new(43, 0);
    let inputs = Inputs::gauss(300, 1000);
    let (layout, contract) = (Layout::new(4, 1, 1).unwrap(), contract(Merge::AgRsF32));
    let mut stale = inputs.clone();
    // local tokens 32 to 47 of rank 2
    for local in 32..48 {
        let position = layout.global_position(local, 2);
        let other = tensor(900 + local as u64, 0, Distribution::Gaussian, KV_HEADS * (QK_DIM + V_DIM));
        stale.key[position * KV_HEADS * QK_DIM..][..KV_HEADS * QK_DIM]
            .copy_from_slice(&other[..KV_HEADS * QK_DIM]);
        stale.value[position * KV_HEADS * V_DIM..][..KV_HEADS * V_DIM]
            .copy_from_slice(&other[KV_HEADS * QK_DIM..]);
    }
    let returned = attend(&stale.problem(), &layout, &inputs.visible(), &contract, HABITS, &mut random);
    let alarms = inputs.examine(&layout, &contract, &returned.out).alarms();
    let alarm = of(&alarms, Detector::Block).expect("a stale block raises an alarm");
    assert_eq!((alarm.rank, alarm.position), (Some(2), Some(layout.global_position(32, 2))), "{alarm}");
}

#[test]
fn a_rank_whose_lse_is_off_is_named_with_the_size_of_its_error() {
    let mut random = Counter::new(44, 0);
    for (run, error) in [3e-3f32, 1e-2, -3e-2, 0.1].into_iter().enumerate() {
        let inputs = Inputs::gauss(400 + run as u64, 1000);
        let (layout, contract) = (Layout::new(8, 1, 1).unwrap(), contract(Merge::A2a));
        let rank = random.below(8) as usize;
        let returned = attend(&inputs.problem(), &layout, &inputs.visible(), &contract, HABITS, &mut random);
        let mut seen = Vec::new();
        for state in 0..ROWS * HEADS {
            let partials: Vec<(Vec<f32>, f32)> = returned
                .partials
                .iter()
                .enumerate()
                .map(|(index, (out, lse))| {
                    let out = out[state * V_DIM..(state + 1) * V_DIM].iter().map(|x| *x as f32).collect();
                    (out, lse[state] as f32 + if index == rank { error } else { 0.0 })
                })
                .collect();
            seen.extend(merge(&contract, &partials, &mut random).0.iter().map(|x| f64::from(round_bf16(*x))));
        }
        let alarms = inputs.examine(&layout, &contract, &seen).alarms();
        let alarm = of(&alarms, Detector::RankLse).expect("a rank's LSE error raises an alarm");
        assert_eq!(alarm.rank, Some(rank), "{alarm}");
        assert!((alarm.amplitude.unwrap() / f64::from(error) - 1.0).abs() < 0.3, "{alarm} for {error}");
    }
}

#[test]
fn a_scale_that_is_off_is_measured() {
    let mut random = Counter::new(45, 0);
    for tokens in [128, 1000] {
        let inputs = Inputs::gauss(500 + tokens as u64, tokens);
        let (layout, contract) = (Layout::new(4, 1, 1).unwrap(), contract(Merge::A2a));
        for (error, detector) in [
            (0.002f32, Detector::ValueScale),
            (-0.01, Detector::ValueScale),
            (0.01, Detector::KeyScale),
            (-0.03, Detector::KeyScale),
        ] {
            let mut scaled = inputs.clone();
            let tensor = if detector == Detector::KeyScale { &mut scaled.key } else { &mut scaled.value };
            tensor.iter_mut().for_each(|x| *x *= 1.0 + error);
            let returned =
                attend(&scaled.problem(), &layout, &inputs.visible(), &contract, HABITS, &mut random);
            let alarms = inputs.examine(&layout, &contract, &returned.out).alarms();
            let alarm =
                of(&alarms, detector).unwrap_or_else(|| panic!("{detector} {error} at {tokens}: {alarms:?}"));
            assert!((alarm.amplitude.unwrap() / f64::from(error) - 1.0).abs() < 0.2, "{alarm} for {error}");
        }
    }
}

#[test]
fn the_fast_second_moments_are_those_of_the_definition() {
    let mut inputs = Inputs::gauss(600, 90);
    // a pair of equal keys on one rank
    inputs.key.copy_within(6 * KV_HEADS * QK_DIM..7 * KV_HEADS * QK_DIM, 12 * KV_HEADS * QK_DIM);
    let problem = inputs.problem();
    for visible in [inputs.visible(), Visible::sliding_window(90, ROWS, 40)] {
        let layout = Layout::new(3, 1, 1).unwrap();
        let exact =
            Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
        let model = Model::new(&problem, &layout, &visible, &contract(Merge::A2a)).unwrap();
        for (exact, fast) in exact.states.iter().zip(&model.moments().states) {
            for (exact, fast) in exact.parts.iter().zip(&fast.parts) {
                let (exact, fast) = (exact.statistics.as_ref().unwrap(), fast.statistics.as_ref().unwrap());
                assert_eq!(exact.distinct, fast.distinct);
                approx::assert_relative_eq!(exact.score_deviation, fast.score_deviation, epsilon = 1e-10);
                approx::assert_relative_eq!(exact.weight_square, fast.weight_square, epsilon = 1e-10);
                for d in 0..V_DIM {
                    approx::assert_relative_eq!(exact.square[d], fast.square[d], epsilon = 1e-12);
                    approx::assert_relative_eq!(exact.class_square[d], fast.class_square[d], epsilon = 1e-12);
                }
            }
        }
    }
}

#[test]
fn a_softcap_a_sink_and_a_window_leave_the_filters_at_work() {
    let mut random = Counter::new(46, 0);
    let inputs = Inputs::gauss(700, 400);
    let sink = [0.5, -1.0, 2.0, 1.0];
    let mut problem = inputs.problem();
    (problem.sink, problem.softcap) = (Some(sink.as_slice()), Some(8.0));
    let visible = Visible::sliding_window(400, ROWS, 160);
    let (layout, contract) = (Layout::new(4, 1, 1).unwrap(), contract(Merge::A2a));
    let model = Model::new(&problem, &layout, &visible, &contract).unwrap();
    let clean = attend(&problem, &layout, &visible, &contract, HABITS, &mut random);
    assert_eq!(model.examine(&clean.out).unwrap().alarms(), []);
    let lost = 333;
    let without: Vec<Visible> =
        visible.iter().map(|seen| Visible::Set(seen.positions().filter(|p| *p != lost).collect())).collect();
    let faulty = attend(&problem, &layout, &without, &contract, HABITS, &mut random);
    let alarms = model.examine(&faulty.out).unwrap().alarms();
    assert_eq!(of(&alarms, Detector::Token).and_then(|alarm| alarm.position), Some(lost), "{alarms:?}");
    let mut scaled = inputs.clone();
    scaled.key.iter_mut().for_each(|k| *k *= 1.02);
    let off = Problem { sink: Some(&sink), softcap: Some(8.0), ..scaled.problem() };
    let returned = attend(&off, &layout, &visible, &contract, HABITS, &mut random);
    let alarm =
        of(&model.examine(&returned.out).unwrap().alarms(), Detector::KeyScale).expect("a key scale alarm");
    assert!((alarm.amplitude.unwrap() / 0.02 - 1.0).abs() < 0.2, "{alarm}");
}

#[test]
fn an_output_that_is_not_finite_is_not_examined() {
    let inputs = Inputs::gauss(800, 20);
    let (layout, contract) = (Layout::single(), contract(Merge::A2a));
    let model = Model::new(&inputs.problem(), &layout, &inputs.visible(), &contract).unwrap();
    let mut seen = vec![0.0; ROWS * HEADS * V_DIM];
    assert!(model.examine(&seen).is_some());
    seen[77] = f64::NAN;
    assert!(model.examine(&seen).is_none());
}

#[test]
fn rows_and_ranks_without_tokens_take_no_part() {
    let inputs = Inputs::gauss(801, 4);
    let (layout, contract) = (Layout::new(8, 2, 2).unwrap(), contract(Merge::A2a));
    let mut random = Counter::new(47, 0);
    let returned = attend(&inputs.problem(), &layout, &inputs.visible(), &contract, HABITS, &mut random);
    let examination = inputs.examine(&layout, &contract, &returned.out);
    assert_eq!(examination.alarms(), []);
    assert!(examination.excluded >= HEADS, "the second row sees one token of the second rank");
    assert!(examination.ranks[2..].iter().all(|filter| filter.energy == 0.0));
}

#[test]
fn a_rank_that_one_token_outweighs_takes_no_part() {
    let mut inputs = Inputs::gauss(802, 64);
    let (layout, contract) = (Layout::new(4, 1, 1).unwrap(), contract(Merge::A2a));
    let visible = inputs.visible();
    let excluded = |inputs: &Inputs| {
        let model = Model::new(&inputs.problem(), &layout, &visible, &contract).unwrap();
        model.admitted().iter().filter(|admitted| !**admitted).count()
    };
    assert_eq!(excluded(&inputs), 0);
    // head 0 of the first row looks along token 8 of rank 0, and at nothing else
    let key = inputs.key[8 * KV_HEADS * QK_DIM..][..QK_DIM].to_vec();
    inputs.query[..QK_DIM].iter_mut().zip(key).for_each(|(query, key)| *query = round_bf16(4.0 * key));
    assert_eq!(excluded(&inputs), 1, "what rounding takes from the rest always has one direction");
}
