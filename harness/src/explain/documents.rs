//! Topics that are more than one table.

use shardcheck_cases::{Body, CASE_SCHEMA_VERSION, Case, MergePattern, StateView, rules};
use shardcheck_engine::{OperationKind, Provenance, RuleSetName};

use super::{Table, axes};
use crate::select::Expression;

/// Expressions that `explain filter-expressions` and docs/selection.md show, with what they select.
const EXAMPLES: [(&str, &str); 8] = [
    ("family(verify) & world(>=4)", "verification over four ranks or more"),
    ("probe(cold | hot) & not model(tiny-mla)", "two probes, but not on that model"),
    ("kv(e4m3fn) & (q(1) | padded(>0))", "an fp8 cache, with one row a request or with graph padding"),
    (
        "pcp(2) & strategy(zigzag | head_tail)",
        "two ranks of prefill context parallelism in one of two splits: batches by themselves and whole transformers",
    ),
    (
        "tokens(1000..=4000) & backend(a2a)",
        "contexts of a thousand to four thousand tokens, merged by all-to-all",
    ),
    ("id(~tp8.dcp4)", "ids with a part in them; a bare text means the same"),
    ("id(/decode/*/cold/*/)", "whole ids by a pattern: `*` for any characters, `?` for one"),
    ("prop(/merge*/) & world(2)", "properties of that name, on cases of two ranks"),
];

/// Ids of the cases that `explain case-json` shows.
const CASES: [(&str, &str); 17] = [
    (
        "attention on caches",
        "verify/tiny-mla/tp4.dcp2.h2.s2.b8.n12.e4m3fn@0.5.a2a.hi_lo.qrep/12+3_0+0_7+2.pad2.shuf/cold/7",
    ),
    (
        "the steps of one session",
        "sequence/tiny-mla/tp3.dcp3.h1.s2.b4.n5.bf16.a2a.hi_lo.lat/rejected/p0+9.c12_v0+4.pad4_r0-3_v0+2.pad2/7",
    ),
    ("a merge of given states", "merge_partials/w3.t4.h2.d16.bf16.a2a.hi_lo/some_empty/sliced/7"),
    ("a batch over the ranks of prefill context parallelism", "pcp/head_tail.p4.owned.pad3/0+11_3+5x2_7+1d"),
    ("a router", "route/sigmoid.biased.e16.k4.g4.kept2.negative_infinity.sum_and_tiny.x2.5/t20.ties/7"),
    (
        "a layer of experts over ranks",
        "moe/sigmoid.scores.e8.k2.g1.kept1.zero.sum.x1/gathered.whole.silu_gated.dp1.pcp2.tp2.replicated/n7.h24.i10.j10.random.random/7",
    ),
    (
        "steps of Kimi delta attention",
        "kda/softplus.h2.hv4.k8.v6.t4/tp2.dcp2.c4.d3/5.n0+0.n1_4.0+1.1_1.0-2w2+2.0+3.n1/slow/7",
    ),
    (
        "attention under prefill context parallelism",
        "attend_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/tiny-mla/tp1.dcp1.h2.s1.b8.n12.bf16.ag_rs/shuf.e4m3fn@0.25/gaussian/7",
    ),
    (
        "steps through all layers of a transformer",
        "stack/l2.h24.i20.v37.sharded/tiny-mla/tp4.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/rejected/v0+9,1+3_v0+4,1+2.pad2_r0-3_d0,1/7",
    ),
    (
        "the same with recurrent layers, latent experts and a shared one",
        "stack/l4.h24.i20.v37.whole.e6.k2.d1.j7.z10.biased.kkkm.qh2.vh4.qd6.vd5.t4.c4.u3.softplus/tiny-mla/tp2.dcp2.h1.s1.b4.n9.bf16.ag_rs/hybrid/v0+9,1+3_v0+4,1+2.pad2_r0-3_d0,1/7",
    ),
    ("acceptance of drafted tokens", "acceptance/block.r2.v37.onehot/3_0_5-2x4/gaussian/7"),
    (
        "selection of tokens",
        "select_sparse/exact.packed.k8.i4.d16.bf16/tp4.dcp2.s2.b8.n12/12+3_0+1.pad2.shuf/random/7",
    ),
    (
        "selection of tokens for a shared batch",
        "select_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/k4.i2.d8/random/7",
    ),
    (
        "compression of the tokens of a shared batch",
        "compress_pcp/head_tail.p4.owned/0+11_3+5x2_7+1d/m4.overlap.d8/newest/7",
    ),
    ("layers that share a selection", "index_layers/atom.l12.m1.kept.f4.o3/FFFSSSF/FFSS"),
    (
        "attention over selected tokens",
        "attend_selected/tiny-mla/tp4.dcp2.h2.s2.b8.n12.e4m3fn@0.5.a2a.hi_lo/12+3_0+0_7+2.pad2.shuf/k4.packed.ragged/gaussian/7",
    ),
    (
        "attention of heads with sinks",
        "attend_sinks/tiny-gqa16/tp4.dcp2.h2.s2.b8.n12.bf16.a2a.hi_lo/12+3_0+0_7+2.pad2.shuf/gaussian/7",
    ),
];

/// Operations and the tensors of each.
pub fn operations() -> String {
    let mut text = String::from(
        "Shapes use: n requests, T query rows with graph padding, ranks = tp, H query heads of a rank, Hall = H·tp,\n\
         Hg = H·dcp, K KV heads, Dk and Dv key and value width, V width after the up-projection, B block size;\n\
         in pcp_layout, attend_pcp, select_pcp and compress_pcp P ranks of prefill context parallelism, N rows of the batch, R rows of a rank with padding;\n\
         in select_pcp I heads of the indexer and D their width, k tokens of a row;\n\
         in compress_pcp m tokens of a block, C columns of a token and d of an entry;\n\
         in route and moe N tokens, E experts, k of a token, h hidden width, I inner width of an expert and J of the shared one, R rows\n\
         of the rank that has most, ranks = dp·pcp·tp of the plan;\n\
         in accept_drafts P ranks of the vocabulary V, K columns of drafts, and T rows, one for each draft and one more a request;\n\
         in select_sparse I heads of the indexer and D their width, k tokens of a row, m entries of a request's blocks;\n\
         in attend_selected k the most tokens of a row;\n\
         in index_layers n layers, those of the drafts behind the model's own;\n\
         in kda P = tp ranks, H query and key heads of all ranks and HV value heads, K and V their widths, taps of the convolution, C channels\n\
         of a rank: H / P·K of queries, as many of keys, HV / P·V of values;\n\
         in forward L layers, V tokens of the vocabulary, h width of the stream and I of an MLP, P rotary width, Vo width of a head behind\n\
         the up-projection, R rows of the stream on a rank, A layers that attend and N recurrent ones with H heads and HV value heads of widths K\n\
         and V, D layers with an MLP and X with E experts, k of a row, z width of latent ones and J of the shared one.\n",
    );
    for kind in OperationKind::ALL {
        let rows = kind.tensors().iter().map(|t| [t.name, provenance(t.provenance), t.shape, t.meaning]);
        text += &format!("\n{kind}\n");
        for line in
            Table::new(["tensor", "who makes it", "type and shape", "what it holds"], rows).to_text().lines()
        {
            text += &format!("  {line}\n");
        }
    }
    text
}

/// Expressions and what they select.
pub fn expression_examples() -> Table {
    Table::new(["expression", "selects"], EXAMPLES.map(|(text, what)| [format!("`{text}`"), what.to_owned()]))
}

/// The language of `-E`.
pub fn filter_expressions() -> String {
    debug_assert!(EXAMPLES.iter().all(|(text, _)| Expression::parse(text).is_ok()));
    format!(
        "An atom is an axis with values in parentheses; `|` between values means any of them.\n\
         Atoms combine with `&` (and), `|` (or), `not` (`!`) and parentheses; `not` binds tightest, then `and`, then `or`.\n\
         Numbers: 4, !=4, <4, <=4, >4, >=4, and 2..=8 with both ends.\n\
         Texts: ~part, =whole, /glob/, and \"…\" around a text with special characters.\n\
         An atom whose axis means nothing for a case does not hold for it.\n\n{}\n{}",
        expression_examples().to_text(),
        axes().to_text()
    )
}

/// A case as a file, by example.
pub fn case_json() -> String {
    let names = |names: &[&str]| names.join(", ");
    let mut text = format!(
        "A case file is one JSON object of schema version {CASE_SCHEMA_VERSION}. Unknown fields are refused, so that a typo can't turn\n\
         a test into a no-op. `shardcheck replay FILE` runs it; an id does the same.\n"
    );
    for (what, id) in CASES {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("the example parses: {error}"));
        text += &format!("\n{what}\n{id}\n{}\n", case.to_json().trim_end());
    }
    if let Some(rule) = RuleSetName::ALL.into_iter().find_map(|set| rules::rule_set(set).first()) {
        let case = Case::rules(rule.clone());
        debug_assert!(matches!(case.body, Body::Rules(_)));
        text += &format!("\na configuration rule\n{}\n{}\n", case.id(), case.to_json().trim_end());
    }
    text += &format!(
        "\npatterns of given states: {}\nviews of given states: {}\n",
        names(&MergePattern::ALL.map(MergePattern::name)),
        names(&StateView::ALL.map(StateView::name)),
    );
    text + "`shardcheck explain families`, `probes` and `filter-expressions` list the other names.\n"
}

fn provenance(provenance: Provenance) -> &'static str {
    match provenance {
        Provenance::Given => "given",
        Provenance::Derived => "given or derived",
        Provenance::Output => "engine",
        Provenance::Observable => "engine, optional",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_expression_parses() {
        for (text, _) in EXAMPLES {
            Expression::parse(text).unwrap_or_else(|error| panic!("{error}"));
            assert!(filter_expressions().contains(text));
        }
    }

    #[test]
    fn every_example_case_is_its_own_id_and_reads_back_from_the_text() {
        let text = case_json();
        for (_, id) in CASES {
            let case: Case = id.parse().unwrap();
            assert_eq!(case.id(), id);
            let json = &text[text.find(id).unwrap() + id.len()..];
            let json = &json[..json.find("\n}\n").unwrap() + 3];
            assert_eq!(Case::from_json(json).unwrap(), case);
        }
    }

    #[test]
    fn every_operation_lists_its_tensors() {
        let text = operations();
        for kind in OperationKind::ALL {
            let block = &text[text.find(&format!("\n{kind}\n")).unwrap()..];
            assert!(kind.tensors().iter().all(|tensor| block.contains(tensor.shape)), "{kind}");
        }
    }
}
