//! Three routes to the same result — the definition, the fast form, and partials per rank that are merged — over
//! random shapes, and the moments by their definition and by the fast form.

use proptest::prelude::*;
use shardcheck_formats::recipe::Counter;
use shardcheck_references::attention::plain::{
    Attention, Problem, Values, attend, attend_deterministic, attend_rank,
};
use shardcheck_references::attention::streaming;
use shardcheck_references::exp::Fixed;
use shardcheck_references::layout::Layout;
use shardcheck_references::merge::{Partial, merge, merge_sink};
use shardcheck_references::moments::{Moments, Part, Passes};
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;

const CLOSE: f64 = 1e-12;

/// The numbers of a problem, and how to see it.
#[derive(Debug, Clone)]
struct Shape {
    seed: u64,
    heads: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    latent: bool,
    tokens: usize,
    rows: usize,
    view: View,
    world: usize,
    interleave: usize,
    sink: bool,
    softcap: bool,
    loudness: f32,
}

#[derive(Debug, Clone, Copy)]
enum View {
    Causal,
    Draft,
    Window,
    Sets,
}

fn shapes() -> impl Strategy<Value = Shape> {
    let heads =
        prop_oneof![Just((1, 1)), Just((4, 4)), Just((8, 2)), Just((6, 1)), Just((24, 3)), Just((130, 1))];
    let dims =
        prop_oneof![Just((4, 4, false)), Just((24, 16, true)), Just((16, 40, false)), Just((9, 5, true))];
    let view = prop_oneof![Just(View::Causal), Just(View::Draft), Just(View::Window), Just(View::Sets)];
    let ranks = (
        prop_oneof![Just(1usize), Just(2), Just(3), Just(4), Just(8)],
        prop_oneof![Just(1usize), Just(4), Just(16)],
    );
    let extras = (any::<bool>(), any::<bool>(), prop_oneof![Just(1f32), Just(6.0), Just(0.01)]);
    let lengths = (prop_oneof![0usize..12, 0usize..300], 1usize..5);
    (any::<u64>(), heads, dims, view, ranks, extras, lengths).prop_map(
        |(
            seed,
            (heads, kv_heads),
            (qk_dim, v_dim, latent),
            view,
            (world, interleave),
            extras,
            (tokens, rows),
        )| {
            let (sink, softcap, loudness) = extras;
            Shape {
                seed,
                heads,
                kv_heads,
                qk_dim,
                v_dim,
                latent,
                tokens,
                rows,
                view,
                world,
                interleave,
                sink,
                softcap,
                loudness,
            }
        },
    )
}

/// Everything that a problem borrows.
struct Made {
    shape: Shape,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    sink: Vec<f64>,
    visible: Vec<Visible>,
    layout: Layout,
}

impl Made {
    fn new(shape: Shape) -> Self {
        let mut random = Counter::new(shape.seed, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let mut query = draw(shape.rows * shape.heads * shape.qk_dim);
        query.iter_mut().for_each(|q| *q *= shape.loudness);
        let key = draw(shape.tokens * shape.kv_heads * shape.qk_dim);
        let value = draw(shape.tokens * shape.kv_heads * shape.v_dim);
        let sink = draw(shape.heads).into_iter().map(f64::from).collect();
        let visible = match shape.view {
            View::Causal => Visible::causal(shape.tokens, shape.rows),
            View::Draft => Visible::draft_block(shape.tokens, shape.rows),
            View::Window => Visible::sliding_window(shape.tokens, shape.rows, 17),
            View::Sets => (0..shape.rows)
                .map(|_| (0..shape.tokens).filter(|_| random.below(3) == 0).collect())
                .map(|positions| Visible::set(positions).unwrap())
                .collect(),
        };
        let layout = Layout::new(shape.world, shape.interleave, shape.interleave).unwrap();
        Self { shape, query, key, value, sink, visible, layout }
    }

    fn problem(&self) -> Problem<'_> {
        let Shape { heads, kv_heads, qk_dim, v_dim, .. } = self.shape;
        let value = if self.shape.latent { Values::KeyPrefix } else { Values::Separate(&self.value) };
        let scale = (qk_dim as f64).powf(-0.5);
        let mut problem = Problem::new(heads, kv_heads, qk_dim, v_dim, scale, &self.query, &self.key, value);
        problem.sink = self.shape.sink.then_some(self.sink.as_slice());
        problem.softcap = self.shape.softcap.then_some(3.0);
        problem
    }

    fn merged(&self, partials: &[Partial]) -> Attention {
        let mut all = merge(partials);
        if self.shape.sink {
            all = merge_sink(&all, &self.sink.repeat(self.shape.rows));
        }
        Attention { out: all.out, lse: all.lse }
    }
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= CLOSE * b.abs().max(1.0)
}

fn assert_same(a: &Attention, b: &Attention, what: &str) {
    assert_eq!((a.out.len(), a.lse.len()), (b.out.len(), b.lse.len()));
    for (a, b) in a.out.iter().chain(&a.lse).zip(b.out.iter().chain(&b.lse)) {
        assert!(close(*a, *b), "{what}: {a} against {b}");
    }
}

fn assert_same_part(fast: &Part, defined: &Part) {
    let pairs = [
        (fast.lse, defined.lse),
        (fast.weight, defined.weight),
        (fast.peak, defined.peak),
        (fast.max_a, defined.max_a),
    ];
    assert!(pairs.iter().all(|(fast, defined)| close(*fast, *defined)), "{pairs:?}");
    assert_eq!(fast.tokens, defined.tokens);
    let vectors = [
        (&fast.out, &defined.out),
        (&fast.abs, &defined.abs),
        (&fast.square, &defined.square),
        (&fast.sum_abs, &defined.sum_abs),
    ];
    for (fast, defined) in vectors {
        assert!(
            fast.iter().zip(defined).all(|(fast, defined)| close(*fast, *defined)),
            "{fast:?} {defined:?}"
        );
    }
    for (fast, defined) in fast.powers.iter().flatten().zip(defined.powers.iter().flatten()) {
        assert!(close(*fast, *defined), "{fast} {defined}");
    }
    assert!(fast.rival_a >= defined.rival_a, "{:?} {:?}", fast.rival_a, defined.rival_a);
}

/// Random problems a property: 300, or as many as `PROPTEST_CASES` says.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn definition_fast_form_and_merged_ranks_agree(shape in shapes()) {
        let made = Made::new(shape);
        let problem = made.problem();
        let defined = attend(&problem, &made.visible);
        assert_same(&attend_deterministic(&problem, &made.visible), &defined, "deterministic");
        assert_same(&streaming::attend(&problem, &made.visible), &defined, "streaming");
        let ranks: Vec<Partial> =
            (0..made.shape.world).map(|rank| attend_rank(&problem, &made.visible, &made.layout, rank)).collect();
        assert_same(&made.merged(&ranks), &defined, "merged ranks");
        let fast = streaming::attend_parts(&problem, Split::Ranks(&made.layout), &made.visible);
        for (fast, rank) in fast.iter().zip(&ranks) {
            let pair = [fast, rank].map(|part| Attention { out: part.out.clone(), lse: part.lse.clone() });
            assert_same(&pair[0], &pair[1], "partials");
        }
    }

    #[test]
    fn moments_by_definition_and_by_the_fast_form_agree(shape in shapes()) {
        let made = Made::new(shape);
        let (problem, split) = (made.problem(), Split::Ranks(&made.layout));
        let defined = Moments::collect_with::<Fixed, f32>(&problem, split, &made.visible).unwrap();
        let fast = Moments::collect(&problem, split, &made.visible, Passes::Two).unwrap();
        let exact = attend(&problem, &made.visible);
        for (index, (fast, defined)) in fast.states.iter().zip(&defined.states).enumerate() {
            assert_eq!(fast.tokens, defined.tokens);
            assert!(close(fast.lse, defined.lse) && close(fast.lse, exact.lse[index]));
            assert!(close(fast.max_abs_score, defined.max_abs_score));
            assert!(close(fast.score_range, defined.score_range));
            for (d, out) in fast.out.iter().enumerate() {
                assert!(close(*out, defined.out[d]) && close(*out, exact.out[index * problem.v_dim + d]));
            }
            let (a, b) = (fast.centred.as_ref().unwrap(), defined.centred.as_ref().unwrap());
            assert!(a.all.iter().zip(&b.all).all(|(a, b)| close(*a, *b)), "{:?} {:?}", a.all, b.all);
            assert!(a.peaks.iter().zip(&b.peaks).all(|(a, b)| close(*a, *b)));
            fast.parts.iter().zip(&defined.parts).for_each(|(fast, defined)| assert_same_part(fast, defined));
        }
    }
}

#[test]
fn long_contexts_are_cut_into_chunks_and_still_agree() {
    let shape = Shape {
        seed: 11,
        heads: 3,
        kv_heads: 1,
        qk_dim: 8,
        v_dim: 6,
        latent: true,
        tokens: 70_000,
        rows: 2,
        view: View::Causal,
        world: 1,
        interleave: 1,
        sink: false,
        softcap: false,
        loudness: 2.0,
    };
    let made = Made::new(shape);
    let problem = made.problem();
    assert_same(
        &streaming::attend(&problem, &made.visible),
        &attend(&problem, &made.visible),
        "70,000 tokens",
    );
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let shape = Shape {
        seed: 12,
        heads: 8,
        kv_heads: 2,
        qk_dim: 16,
        v_dim: 16,
        latent: false,
        tokens: 20_000,
        rows: 2,
        view: View::Causal,
        world: 3,
        interleave: 4,
        sink: true,
        softcap: false,
        loudness: 1.0,
    };
    let made = Made::new(shape);
    let (problem, split) = (made.problem(), Split::Ranks(&made.layout));
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let moments = Moments::collect(&problem, split, &made.visible, Passes::Two).unwrap();
            (streaming::attend(&problem, &made.visible), moments)
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(5));
}

#[test]
fn an_infinite_or_nan_visible_input_is_inconclusive_and_a_hidden_one_is_not_read() {
    use shardcheck_formats::contract::{Contract, Merge};
    use shardcheck_references::bound::certify;
    use shardcheck_references::moments::Underivable;
    let contract = Contract::bf16_default(Merge::A2a);
    let layout = Layout::new(2, 1, 1).unwrap();
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in 0..3 {
            let (mut query, mut key, mut value) = (vec![1f32; 4], vec![0.5f32; 4 * 6], vec![1f32; 4 * 6]);
            match place {
                0 => query[1] = poison,
                1 => key[2 * 4 + 1] = poison,
                _ => value[2 * 4 + 3] = poison,
            }
            let problem = Problem::new(1, 1, 4, 4, 0.5, &query, &key, Values::Separate(&value));
            let error = certify(&problem, &layout, &[Visible::Prefix(6)], &contract).unwrap_err();
            assert_eq!(error, Underivable::NonFinite { row: 0, head: 0 }, "{poison} in {place}");
            if place > 0 {
                let hidden = Visible::set(vec![0, 1, 3, 4, 5]).unwrap();
                assert!(certify(&problem, &layout, &[hidden], &contract).is_ok());
                assert!(certify(&problem, &layout, &[Visible::Prefix(2)], &contract).is_ok());
            }
        }
    }
}

#[test]
fn weights_that_may_be_off_by_a_factor_are_inconclusive() {
    use shardcheck_formats::contract::{Contract, Merge};
    use shardcheck_references::bound::certify;
    use shardcheck_references::moments::Underivable;
    let (query, key) = (vec![300f32; 64], vec![300f32; 64 * 3]);
    let problem = Problem::new(1, 1, 64, 64, 1.0, &query, &key, Values::KeyPrefix);
    let contract = Contract { u_acc: 2f64.powi(-11), ..Contract::bf16_default(Merge::A2a) };
    let error = certify(&problem, &Layout::single(), &[Visible::Prefix(3)], &contract).unwrap_err();
    assert!(matches!(error, Underivable::WeightError { row: 0, head: 0, .. }), "{error:?}");
    assert!(error.to_string().contains("u_acc"));
}
