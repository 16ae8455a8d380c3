//! What a selection takes in, what it leaves out, and how it refuses.

use clap::Parser;
use proptest::prelude::*;

use super::*;
use crate::sample;
use shardcheck_cases::{
    Body, CASE_SCHEMA_VERSION, Family, MergeCase, MergePattern, StateView, SuiteName, suite,
};
use shardcheck_engine::{CommBackend, LaneOrder};
use shardcheck_formats::Dtype;

const ID: &str = "verify/tiny-mla@tp8.dcp4";

#[derive(clap::Parser)]
struct Command {
    #[command(flatten)]
    select: SelectArgs,
}

fn selection(arguments: &[&str]) -> Result<Selection, SelectError> {
    Command::try_parse_from([&["shardcheck"], arguments].concat()).unwrap().select.selection()
}

fn matches(expression: &str) -> bool {
    let expression = Expression::parse(expression).unwrap_or_else(|error| panic!("{error}"));
    expression.may_match(&Subject { id: ID, case: &sample::case(), property: None })
}

fn message(expression: &str) -> String {
    Expression::parse(expression).unwrap_err().to_string()
}

fn merge_case() -> Case {
    Case {
        schema_version: CASE_SCHEMA_VERSION,
        family: Family::MergePartials,
        body: Body::Merge(MergeCase {
            world: 3,
            rows: 5,
            heads_per_rank: 2,
            dim: 16,
            dtype: Dtype::Bf16,
            comm_backend: CommBackend::AgRs,
            lane_order: LaneOrder::HiLo,
            pattern: MergePattern::SomeEmpty,
            view: StateView::Sliced,
        }),
        seed: 1,
    }
}

#[test]
fn a_case_is_found_by_each_of_its_axes() {
    for expression in [
        "family(verify)",
        "model(tiny-mla)",
        "probe(cold)",
        "kv(e4m3fn)",
        "backend(a2a)",
        "lane(hi_lo)",
        "world(4)",
        "tp(8)",
        "interleave(4)",
        "block(16)",
        "q(4)",
        "heads(8)",
        "tokens(104)",
        "rows(7)",
        "requests(3)",
        "padded(1)",
        "placement(shuf)",
        "qrep(true)",
        "pbm(false)",
        "latent(false)",
        "seed(7)",
        "id(tiny-mla)",
    ] {
        assert!(matches(expression), "{expression}");
        assert!(!matches(&format!("not {expression}")), "not {expression}");
    }
}

#[test]
fn what_a_case_says_of_its_axes_selects_it() {
    for case in [sample::case(), merge_case()] {
        let values = Axis::values_of(&case);
        assert!(values.len() >= 8, "{values:?}");
        for (axis, value) in values {
            let expression = Expression::parse(&format!("{axis}({value})")).unwrap();
            assert!(expression.may_match(&Subject { id: ID, case: &case, property: None }), "{expression}");
        }
    }
}

#[test]
fn every_case_of_a_suite_is_selected_by_what_it_says_of_its_axes_and_by_its_id() {
    let cases: Vec<Case> = suite(SuiteName::Gate, 1).into_iter().step_by(25).collect();
    assert!(cases.len() > 10);
    for case in &cases {
        let id = case.id();
        let atoms: Vec<String> =
            Axis::values_of(case).iter().map(|(axis, value)| format!("{axis}({value})")).collect();
        let expression = Expression::parse(&format!("{} & id(=\"{id}\")", atoms.join(" & "))).unwrap();
        let selected = cases
            .iter()
            .filter(|other| expression.may_match(&Subject { id: &other.id(), case: other, property: None }));
        assert_eq!(selected.count(), 1, "{expression}");
    }
}

#[test]
fn a_merge_case_has_axes_of_its_own_and_lacks_those_of_attention() {
    let case = merge_case();
    let subject = Subject { id: "merge_partials/x", case: &case, property: None };
    for (expression, expected) in [
        ("dtype(bf16) & pattern(some_empty) & view(sliced)", true),
        ("world(3) & heads(6) & rows(5) & backend(ag_rs)", true),
        ("lane(hi_lo | lo_hi)", false),
        ("probe(cold) | kv(bf16) | tp(>=0) | qrep(false)", false),
        ("not kv(bf16)", true),
    ] {
        assert_eq!(Expression::parse(expression).unwrap().may_match(&subject), expected, "{expression}");
    }
}

#[test]
fn numbers_compare_and_ranges_hold_both_ends() {
    for (test, expected) in [
        ("4", true),
        ("=4", true),
        ("==4", true),
        ("!=4", false),
        (">=4", true),
        (">4", false),
        ("<=4", true),
        ("< 4", false),
        ("2..=4", true),
        ("4..=8", true),
        ("5..=8", false),
        ("1 | 4", true),
        ("1 | >=5", false),
    ] {
        assert_eq!(matches(&format!("world({test})")), expected, "world({test})");
    }
}

#[test]
fn operators_bind_as_they_do_elsewhere() {
    // or(and(false, false), true), where the other grouping would be false
    assert!(matches("world(2) & world(2) | world(4)"));
    assert!(!matches("world(2) & (world(2) | world(4))"));
    assert!(matches("not world(2) & world(4)"));
    assert!(!matches("not (not world(2) & world(4))"));
    assert!(matches("!world(2)and not probe(hot)or world(9)"));
    assert!(matches("world(4) && (probe(hot) || probe(cold))"));
}

#[test]
fn ids_match_by_part_whole_or_glob() {
    for (test, expected) in [
        ("tiny", true),
        ("~tiny", true),
        ("=tiny", false),
        ("=verify/tiny-mla@tp8.dcp4", true),
        ("/verify/*dcp?/", true),
        ("/verify/*/", true),
        ("/tiny*/", false),
        ("/*dcp4/", true),
        ("/*dcp/", false),
        ("\"tiny-mla\"", true),
        ("=\"verify/tiny-mla@tp8.dcp4\"", true),
    ] {
        assert_eq!(matches(&format!("id({test})")), expected, "id({test})");
    }
}

#[test]
fn a_glob_with_many_stars_does_not_take_for_ever() {
    let case = sample::case();
    let id = "a".repeat(2000);
    let expression = Expression::parse(&format!("id(/{}b/)", "a*".repeat(200))).unwrap();
    assert!(!expression.may_match(&Subject { id: &id, case: &case, property: None }));
}

#[test]
fn a_property_atom_selects_properties_and_keeps_every_case_that_may_have_one() {
    let selection = selection(&["-E", "prop(merge.bound) & world(4)"]).unwrap();
    let case = sample::case();
    assert!(selection.matches(ID, &case));
    assert!(selection.matches_property(ID, &case, "merge.bound"));
    assert!(!selection.matches_property(ID, &case, "layout.exact"));
    assert!(selection.matches_any_of(ID, &case, ["layout.exact", "merge.bound"]));
    assert!(!selection.matches_any_of(ID, &case, ["layout.exact"]), "nothing would be judged");
    let other = Selection { expression: Some("prop(merge.bound) & world(2)".parse().unwrap()), ..selection };
    assert!(!other.matches(ID, &case), "the world alone decides");
    let negated = Selection { expression: Some("not prop(~merge)".parse().unwrap()), ..other };
    assert!(negated.matches(ID, &case) && !negated.matches_property(ID, &case, "merge.bound"));
}

#[test]
fn a_mistyped_value_is_marked_and_the_valid_ones_are_listed() {
    let message = message("family(verify) & probe(cld)");
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines[0], "unknown probe \"cld\"; did you mean \"cold\"?");
    assert_eq!(lines[1], "  family(verify) & probe(cld)");
    assert_eq!(lines[2], "                         ^^^");
    assert!(lines[3].starts_with("values of probe: gaussian, newest-dominant"), "{message}");
}

#[test]
fn a_mistyped_axis_is_marked_and_the_valid_ones_are_listed() {
    let message = message("wrld(4)");
    assert!(message.starts_with("unknown axis \"wrld\"; did you mean \"world\"?"), "{message}");
    for axis in Axis::ALL {
        assert!(message.contains(axis.name()), "{} is not listed", axis.name());
    }
}

#[test]
fn every_way_to_misspell_an_expression_has_its_own_error() {
    for (expression, expected, place) in [
        ("", "an axis such as", 0),
        ("world(4) &", "an axis such as", 10),
        ("world(4) world(2)", "`&`, `|` or the end", 9),
        ("world", "takes its value in parentheses", 0),
        ("world()", "lacks a value", 6),
        ("world(4 | )", "lacks a value", 10),
        ("world(four)", "\"four\" is none", 6),
        ("world(2..8)", "\"2..8\" is none", 6),
        ("world(-1)", "\"-1\" is none", 6),
        ("world(8..=2)", "holds nothing", 6),
        ("(world(4)", "not closed", 0),
        ("world(4", "not closed", 5),
        ("qrep(true | false)", "takes one value", 12),
        ("qrep(yes)", "unknown qrep \"yes\"", 5),
        ("id(\"open)", "quoted text", 3),
        ("id(\"a\"b)", "quoted text", 3),
        ("id(/open)", "between two slashes", 3),
        ("id(~)", "lacks a value", 3),
        ("kv(fp8)", "unknown kv \"fp8\"", 3),
        ("model(tiny-mal)", "did you mean \"tiny-mla\"?", 6),
    ] {
        let error = Expression::parse(expression).unwrap_err();
        assert!(error.to_string().contains(expected), "{expression}: {error}");
        assert_eq!(error.span.start, place, "{expression}: {error}");
    }
}

#[test]
fn endless_nesting_is_refused_instead_of_exhausting_the_stack() {
    for open in ["(", "!", "not "] {
        let error = Expression::parse(&open.repeat(100_000)).unwrap_err();
        assert_eq!(error.kind, ExpressionErrorKind::TooDeep);
    }
}

#[test]
fn positional_texts_widen_and_skips_narrow() {
    let selection = selection(&["verify", "decode", "--skip", "dcp2", "-k", "layout"]).unwrap();
    for (id, expected) in [
        ("verify/dcp4", true),
        ("decode/dcp4", true),
        ("layout/x", true),
        ("verify/dcp2", false),
        ("write", false),
    ] {
        assert_eq!(selection.matches_id(id), expected, "{id}");
    }
}

#[test]
fn exact_takes_whole_ids_and_refuses_one_that_no_case_has() {
    let selection = selection(&["--exact", "verify/a"]).unwrap();
    assert!(selection.matches_id("verify/a") && !selection.matches_id("verify/ab"));
    assert!(selection.check_exact(["verify/a", "verify/b"]).is_ok());
    let error = selection.check_exact(["verify/b"]).unwrap_err().to_string();
    assert!(error.contains("did you mean \"verify/b\""), "{error}");
}

#[test]
fn a_whole_id_that_is_spelt_another_way_is_told_with_the_right_one() {
    let known = ["pcp/head_tail.p2.owned/0+4", "pcp/head_tail.p8.owned/3+17"];
    let selection = selection(&["--exact", "pcp/head_tail.p02.owned/0+4"]).unwrap();
    let error = selection.check_exact(known).unwrap_err().to_string();
    assert!(error.ends_with("did you mean \"pcp/head_tail.p2.owned/0+4\"?"), "{error}");
}

#[test]
fn a_case_list_is_read_without_its_comments() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.txt");
    std::fs::write(&file, "# from last night\n\nverify/a\r\n  decode/b  \n").unwrap();
    let chosen = selection(&["--caselist", file.to_str().unwrap()]).unwrap();
    assert_eq!(chosen.exact.iter().collect::<Vec<_>>(), ["decode/b", "verify/a"]);
    assert!(!chosen.matches_id("verify/c"));
    std::fs::write(&file, "# nothing\n").unwrap();
    assert!(matches!(
        selection(&["--caselist", file.to_str().unwrap()]),
        Err(SelectError::EmptyCaseList { .. })
    ));
    assert!(matches!(selection(&["--caselist", "/no/such/file"]), Err(SelectError::CaseList { .. })));
}

#[test]
fn several_expressions_widen_the_selection() {
    let selection = selection(&["-E", "world(2)", "--filter-expr", "probe(cold)"]).unwrap();
    assert!(selection.matches(ID, &sample::case()));
    assert_eq!(selection.expression.unwrap().to_string(), "world(2) | probe(cold)");
}

#[test]
fn options_that_would_mislead_are_refused() {
    let error = selection(&["-k", "verify and not cold"]).unwrap_err().to_string();
    assert!(error.contains("-E 'family(verify) & not probe(cold)'"), "{error}");
    assert!(matches!(selection(&["--skip", ""]), Err(SelectError::EmptyText { option: "--skip" })));
    assert!(matches!(selection(&["--partition", "hash:0/8"]), Err(SelectError::Partition(_))));
}

#[test]
fn a_selection_survives_the_header_of_a_run() {
    let selection =
        selection(&["verify", "--skip", "cold", "-E", "world(>=4) & not q(1)", "--partition", "hash:2/3"])
            .unwrap();
    let value = serde_json::to_value(&selection).unwrap();
    assert_eq!(value["expression"], "world(>=4) & not q(1)");
    assert_eq!(serde_json::from_value::<Selection>(value).unwrap(), selection);
    assert_eq!(
        selection.to_string(),
        "id contains \"verify\", id does not contain \"cold\", world(>=4) & not q(1), in partition hash:2/3"
    );
    assert!(!selection.is_everything() && Selection::default().is_everything());
}

#[test]
fn the_help_of_the_options_names_them_all() {
    let help = <Command as clap::CommandFactory>::command().render_long_help().to_string();
    for option in ["FILTER", "--exact", "-E", "--filter-expr", "-k", "--skip", "--partition", "--caselist"] {
        assert!(help.contains(option), "{option} is missing in\n{help}");
    }
}

#[test]
fn a_whole_property_id_that_nobody_has_is_refused_wherever_it_stands() {
    let known = ["verify.output", "merge.output"];
    let check = |text: &str| selection(&["-E", text]).unwrap().check_properties(known);
    for fine in
        ["prop(verify.output)", "prop(~nothing | /nothing*/)", "id(verify.outptu)", "not prop(=merge.output)"]
    {
        check(fine).unwrap_or_else(|error| panic!("{fine}: {error}"));
    }
    let message = check("family(verify) & not (world(2) | prop(verify.outptu))").unwrap_err().to_string();
    assert_eq!(message, "no property has the id \"verify.outptu\"; did you mean \"verify.output\"?");
    let message = check("prop(\"zzz\")").unwrap_err().to_string();
    assert!(message.contains("shardcheck explain properties"), "{message}");
}

fn number_tests() -> impl Strategy<Value = NumberTest> {
    prop_oneof![
        any::<u64>().prop_map(NumberTest::Is),
        any::<u64>().prop_map(NumberTest::Not),
        any::<u64>().prop_map(NumberTest::Below),
        any::<u64>().prop_map(NumberTest::AtMost),
        any::<u64>().prop_map(NumberTest::Above),
        any::<u64>().prop_map(NumberTest::AtLeast),
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| NumberTest::Between(a.min(b), a.max(b))),
    ]
}

fn text_tests() -> impl Strategy<Value = TextTest> {
    let text = prop_oneof![any::<String>(), "[a-z0-9./=~|()\"\\\\ *?-]{0,12}"];
    (text, 0..3).prop_map(|(text, kind)| match kind {
        0 => TextTest::Contains(text),
        1 => TextTest::Is(text),
        _ => TextTest::Glob(text),
    })
}

fn atoms() -> impl Strategy<Value = Atom> {
    (proptest::sample::select(Axis::ALL.to_vec()), proptest::collection::vec(number_tests(), 1..4))
        .prop_flat_map(|(axis, numbers)| match axis {
            Axis::Choice(choice) => {
                proptest::collection::vec(proptest::sample::select(choice.values()), 1..4)
                    .prop_map(move |names| Atom::Choice(choice, names))
                    .boxed()
            }
            Axis::Number(number) => Just(Atom::Number(number, numbers)).boxed(),
            Axis::Truth(truth) => any::<bool>().prop_map(move |wanted| Atom::Truth(truth, wanted)).boxed(),
            Axis::Text(TextAxis::Model) => proptest::sample::select(axis.values())
                .prop_map(|name| Atom::Text(TextAxis::Model, vec![TextTest::Is(name.to_owned())]))
                .boxed(),
            Axis::Text(text) => proptest::collection::vec(text_tests(), 1..3)
                .prop_map(move |tests| Atom::Text(text, tests))
                .boxed(),
        })
}

fn expressions() -> impl Strategy<Value = Expression> {
    atoms().prop_map(Expression::Atom).prop_recursive(6, 24, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|e| Expression::Not(Box::new(e))),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| Expression::And(Box::new(a), Box::new(b))),
            (inner.clone(), inner).prop_map(|(a, b)| Expression::Or(Box::new(a), Box::new(b))),
        ]
    })
}

proptest! {
    #[test]
    fn the_text_of_an_expression_parses_back_to_it(expression in expressions()) {
        let text = expression.to_string();
        let parsed = Expression::parse(&text);
        prop_assert_eq!(parsed.map_err(|error| error.to_string()), Ok(expression), "{}", text);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[a-z(|)&! \"/~=0-9é.<>]{0,40}") {
        if let Err(error) = Expression::parse(&text) {
            prop_assert!(error.to_string().contains('^'));
        }
    }
}

/// A stack over ranks of prefill context parallelism, whose first step is padded.
const STACK: &str = "stack/l3.h24.i20.v37.sharded.e6.k2.d1.pcp2.head_tail.owned/tiny-mla/tp4.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/x/v0+9,1+3.pad2_d0,1/7";

#[test]
fn a_case_of_every_family_is_found_by_its_ranks_sizes_and_split() {
    for (id, expression) in [
        (
            STACK,
            "pcp(2) & dcp(2) & tp(4) & strategy(head_tail) & decodes(owned) & stream(sharded) & wired(false)",
        ),
        (STACK, "layers(3) & experts(6) & topk(2) & drafts(0) & padded(2) & steps(2)"),
        (STACK, "q(9) & rows(14) & requests(2) & tokens(10)"),
        (
            "stack/l2.h40.i9.v8.whole.wired.m3.r2/tiny-mla/mla24+8v12.tp2.dcp2.h1.s1.b2.n40.bf16.ag_rs/drafts/v0+5,1+6/7",
            "wired(true) & drafts(3) & steps(3) & pcp(1) & experts(0) & not topk(>=0)",
        ),
        (
            "pcp/zigzag.p2.replicated.pad3/0+4_3+0",
            "pcp(2) & world(2) & strategy(zigzag) & padded(3) & not dcp(>=0)",
        ),
        (
            "attend_pcp/zigzag.p2.replicated/0+11_3+5/tiny-mla/tp2.dcp2.h2.s1.b8.n9.bf16.ag_rs/shuf.bf16/gaussian/1",
            "pcp(2) & dcp(2) & strategy(zigzag) & decodes(replicated) & world(2)",
        ),
        (
            "select_sparse/exact.padded.k8.i4.d16.bf16/tp4.dcp2.s2.b8.n12/12+3_0+1.pad2.shuf/random/1",
            "selected(8) & dcp(2) & pattern(random) & placement(shuf) & padded(2)",
        ),
        (
            "sequence/tiny-mla/tp2.dcp2.h1.s1.b2.n40.bf16.ag_rs/x/p0+12.c64_d0.pad3/1",
            "dcp(2) & padded(3) & steps(2) & tokens(13) & q(12)",
        ),
    ] {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
        let parsed = Expression::parse(expression).unwrap_or_else(|error| panic!("{error}"));
        assert!(parsed.may_match(&Subject { id, case: &case, property: None }), "{id}: {expression}");
    }
}

#[test]
fn every_axis_means_something_for_a_case_of_the_gate() {
    let cases = suite(SuiteName::Gate, 1);
    for axis in Axis::ALL.into_iter().filter(|axis| !matches!(axis, Axis::Text(_))) {
        assert!(cases.iter().any(|case| axis.value_of(case).is_some()), "{}", axis.name());
    }
}

#[test]
fn a_name_that_an_axis_has_elsewhere_and_a_value_without_its_axis_are_told() {
    for (expression, meant) in [
        ("pcp_size(2)", "did you mean \"pcp\"?"),
        ("batch_size(2)", "did you mean \"requests\"?"),
        ("Tensor-Parallel-Size(2)", "did you mean \"tp\"?"),
        ("padding(2)", "did you mean \"padded\"?"),
        ("num_hidden_layers(2)", "did you mean \"layers\"?"),
        ("zigzag", "did you mean \"strategy(zigzag)\"?"),
        ("stack & world(2)", "did you mean \"family(stack)\"?"),
        ("startegy(zigzag)", "did you mean \"strategy\"?"),
        ("TP(2)", "did you mean \"tp\"?"),
    ] {
        let message = message(expression);
        assert!(message.contains(meant), "{message}");
    }
    assert!(!message("xyzzy(2)").contains("did you mean"));
}

#[test]
fn a_name_from_elsewhere_is_no_axis_and_stands_for_one() {
    let mut seen = BTreeSet::new();
    for (axis, names) in axis::ELSEWHERE {
        assert!(Axis::find(axis).is_some(), "{axis}");
        for name in names {
            assert!(Axis::find(name).is_none() && seen.insert(name), "{name}");
        }
    }
}
