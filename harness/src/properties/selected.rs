//! Laws of attention over selected tokens: what each rank lists and attends to, and that nothing else of the batch counts.

use shardcheck_cases::{Case, Family};
use shardcheck_engine::{Operation, Tensor, Tensors};
use shardcheck_formats::{Dtype, Overflow, encode};

use super::lists::Lists;
use super::{Property, always, attend, equal};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory, Observed, Run};
use crate::material::AttentionMaterial;

const SELECTED: &[Family] = &[Family::AttendSelected];
const EXACT_BITS: &str = "exact: bits";

pub(super) const PROPERTIES: &[Property] = &[
    property!(
        "selected.lists",
        SELECTED,
        always,
        "a rank counts and lists the tokens of a row that it owns, each in its slot, in the declared form; a row without any has no token",
        "ATOM `dcp_sparse_filter`; vLLM `filter_and_convert_dcp_index`",
        &["ATOM#1832", "vllm#46514"],
        attend::EXACT,
        lists
    ),
    property!(
        "selected.query",
        SELECTED,
        always,
        "every rank's kernel receives the query heads of its whole group for every row of selected tokens, in head order",
        "ATOM decode: all-gather of Q, or query replication",
        &["vllm-ascend#4687"],
        EXACT_BITS,
        attend::query
    ),
    property!(
        "selected.partial-lse",
        SELECTED,
        always,
        "each rank's LSE is that of attention over the selected tokens that it owns, and −inf where it owns none of a row",
        "FlashMLA sparse decode; ATOM: an empty row has length 0 and LSE −inf",
        &["ATOM#1832"],
        attend::CERTIFIED_LSE,
        attend::partial_lse
    ),
    property!(
        "selected.partial-output",
        SELECTED,
        always,
        "each rank's partial output is attention over the selected tokens that it owns",
        "FlashMLA sparse decode",
        &["ATOM#1832", "sglang#34765"],
        attend::CERTIFIED,
        attend::partial_output
    ),
    property!(
        "selected.lse",
        SELECTED,
        always,
        "the merged LSE is that of attention over the selected tokens of all ranks",
        "log-sum-exp over a partition",
        &["ATOM#1832"],
        attend::CERTIFIED_LSE,
        attend::lse
    ),
    property!(
        "selected.output",
        SELECTED,
        always,
        "the output of a row is attention over its selected tokens and no other, on every rank",
        "DeepSeek-V3.2: softmax over the selected tokens; merge by LSE is exact over a partition",
        &["ATOM#1832", "sglang#34765"],
        attend::CERTIFIED,
        attend::output
    ),
    property!(
        "selected.others",
        SELECTED,
        crate::run::is_small,
        "tokens that no row of their request selected may hold anything, NaN included: not a bit of an output changes",
        "a kernel reads the slots of its lists alone",
        &[],
        EXACT_BITS,
        others
    ),
    property!(
        "selected.order",
        SELECTED,
        crate::run::is_small,
        "the order in which a row's tokens are given does not matter",
        "a selection is a set; top-k kernels give it in any order",
        &[],
        "sum of the certified bounds of both runs",
        order
    ),
    property!(
        "selected.shared",
        SELECTED,
        crate::run::is_small,
        "a layer that shares a selection answers as with a list of its own, and a layer with its own renews what those behind it share",
        "IndexShare: ATOM rebuilds work plans after full layers only",
        &["ATOM#1362"],
        EXACT_BITS,
        shared
    ),
    property!(
        "selected.flat",
        SELECTED,
        has_several_rows,
        "rows of a prompt or of drafts are rows of q = 1: each as a request of its own, as long as it sees, gives the same bits",
        "ATOM and vLLM sparse prefill: one row a token, longest query 1",
        &[],
        EXACT_BITS,
        flat
    ),
];

fn has_several_rows(case: &Case) -> bool {
    let several = match &case.body {
        shardcheck_cases::Body::Attention(own) => own.workload.max_query_tokens() > 1,
        _ => false,
    };
    several && crate::run::is_small(case)
}

fn lists(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let Some(selected) = material.case.selected else {
        return Err(Halt::Inconclusive("the case selects no tokens".to_owned()));
    };
    let (observed, rows) = (laboratory.observed()?, material.rows.len());
    let lists = Lists::read(material.ranks(), (rows, selected.top_k), |name, shape| {
        Ok(observed.observable(name, Dtype::I32, shape)?.to_i64())
    })?;
    let mut compared = lists.len();
    for rank in 0..material.ranks() {
        let broken =
            |why: String| Halt::from(Failure::because(format!("rank {rank}, {why}")).at(Stage::Layout));
        lists.form_holds(rank, selected.list, |row| material.row_name(row)).map_err(broken)?;
        for row in 0..rows {
            let own = own_slots(material, row, rank);
            let of_row = |why: String| broken(format!("{}: {why}", material.row_name(row)));
            compared += lists.count_holds(rank, row, own.len()).map_err(of_row)?;
            compared += lists.slots_hold(rank, row, &own).map_err(of_row)?;
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

/// Positions that a row attends to on a rank, each with its slot there.
fn own_slots(material: &AttentionMaterial, row: usize, rank: usize) -> Vec<(usize, i64)> {
    let Some((request, _)) = material.rows[row] else { return Vec::new() };
    let (table, member) = (material.block_table(request), material.dcp_rank(rank));
    let visible = material.visible(row);
    let with_slot =
        visible.positions().map(|position| (position, material.layout.slot(position, member, table)));
    with_slot.filter(|(_, slot)| *slot >= 0).collect()
}

/// The step on a session with the caches given, its inputs changed.
fn again(
    laboratory: &Laboratory,
    caches: &Tensors,
    change: impl FnOnce(&mut Tensors),
) -> Result<Observed, Halt> {
    let material = laboratory.attention();
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    run.step(&Operation::LoadCache, caches)?;
    let mut inputs = material.step_inputs();
    change(&mut inputs);
    run.step(&material.operation(), &inputs)
}

fn others(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let caches = material.laid_out_caches();
    let mut poisoned = caches.clone();
    if let Some(cache) = poisoned.get_mut("key_cache") {
        poison(material, cache);
    }
    let (plain, other) = (again(laboratory, &caches, |_| {})?, again(laboratory, &poisoned, |_| {})?);
    let rows: Vec<_> = (0..material.rows.len()).map(|row| (row, row)).collect();
    let headline = "a token that was not selected changes an output";
    equal::compare(material, &plain, material, &other, &rows, true, headline)
}

/// Puts NaN into the slots of tokens that no row of their request attends to.
fn poison(material: &AttentionMaterial, cache: &mut Tensor) {
    let configuration = material.configuration();
    let dtype = configuration.kv_dtype;
    let width: usize = cache.shape()[3..].iter().product::<usize>() * dtype.size_bytes();
    let nan = encode(dtype, f64::NAN, Overflow::NonFinite).to_le_bytes()[..dtype.size_bytes()].to_vec();
    let row_of_nan = nan.repeat(width / nan.len());
    let slots = configuration.blocks * configuration.block_size;
    for (request, spec) in material.case.workload.requests.iter().enumerate() {
        let rows =
            (0..material.rows.len()).filter(|row| material.rows[*row].is_some_and(|(of, _)| of == request));
        let taken: Vec<_> = rows.map(|row| material.visible(row)).collect();
        for position in
            (0..spec.seq_len()).filter(|position| !taken.iter().any(|own| own.contains(*position)))
        {
            for rank in 0..material.ranks() {
                let table = material.block_table(request);
                let slot = material.layout.slot(position, material.dcp_rank(rank), table);
                let Ok(slot) = usize::try_from(slot) else { continue };
                let at = (rank * slots + slot) * width;
                cache.bytes_mut()[at..at + width].copy_from_slice(&row_of_nan);
            }
        }
    }
}

fn order(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let other = again(laboratory, &material.laid_out_caches(), |inputs| {
        let Some(topk) = inputs.find("topk") else { return };
        let shape = topk.shape().to_vec();
        let mut positions: Vec<i32> = topk.to_i64().into_iter().map(|position| position as i32).collect();
        for row in positions.chunks_exact_mut(shape[1]) {
            let end = row.iter().position(|position| *position < 0).unwrap_or(row.len());
            row[..end].reverse();
        }
        inputs.insert("topk", Tensor::from_i32(&shape, &positions));
    })?;
    let rows: Vec<_> = (0..material.rows.len()).map(|row| (row, row)).collect();
    let headline = "another order of the same tokens gives another output";
    equal::compare(material, laboratory.observed()?, material, &other, &rows, false, headline)
}

/// The tokens of each row without the first one: other counts and other slots, for a layer that selects anew.
fn without_first(topk: &Tensor) -> Tensor {
    let shape = topk.shape().to_vec();
    let mut positions: Vec<i32> = topk.to_i64().into_iter().map(|position| position as i32).collect();
    for row in positions.chunks_exact_mut(shape[1]) {
        row.rotate_left(1);
        row[shape[1] - 1] = -1;
    }
    Tensor::from_i32(&shape, &positions)
}

fn shared(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let Operation::AttendSelected { list, .. } = material.operation() else {
        return Err(Halt::Inconclusive("the case selects no tokens".to_owned()));
    };
    // the layer behind has caches of its own
    let mut inputs = material.inputs.clone();
    inputs.keys.iter_mut().flatten().for_each(|value| *value = -*value);
    let behind = material.with_inputs(inputs)?.laid_out_caches();
    let layers = [material.laid_out_caches(), behind];
    let own = material.step_inputs();
    let Some(first) = own.find("topk") else {
        return Err(Halt::Inconclusive("the case selects no tokens".to_owned()));
    };
    let selections = [first.clone(), without_first(first)];
    let mut run = Run::open(&laboratory.engine, material.configuration())?;
    let rows: Vec<_> = (0..material.rows.len()).map(|row| (row, row)).collect();
    let mut measured = Measured::exact(0);
    for selection in selections {
        for (caches, shared) in layers.iter().zip([false, true]) {
            run.step(&Operation::LoadCache, caches)?;
            let mut given = own.clone();
            given.insert("topk", selection.clone());
            let wanted = again(laboratory, caches, |inputs| *inputs = given.clone())?;
            if shared {
                given.remove("topk");
            }
            let seen = run.step(&Operation::AttendSelected { list, shared }, &given)?;
            let headline = match shared {
                true => "a layer that shares a selection answers otherwise than with its own list",
                false => "a layer answers by another selection than its own",
            };
            match equal::compare(material, &seen, material, &wanted, &rows, true, headline)? {
                Finding::Holds(more) => measured = measured.and(more),
                other => return Ok(other),
            }
        }
    }
    Ok(Finding::Holds(measured))
}

fn flat(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.attention();
    let caches = material.laid_out_caches();
    let plain = again(laboratory, &caches, |_| {})?;
    let other = again(laboratory, &caches, |inputs| {
        let requests: Vec<(usize, usize)> = material.rows.iter().flatten().copied().collect();
        let count = requests.len();
        let mut table = Vec::new();
        for (request, _) in &requests {
            table.extend_from_slice(material.block_table(*request));
        }
        let seen = |(request, t): &(usize, usize)| {
            (material.case.workload.requests[*request].context_tokens + t + 1) as i32
        };
        let lens: Vec<i32> = requests.iter().map(seen).collect();
        let starts: Vec<i32> = (0..=count as i32).collect();
        inputs.insert("seq_lens", Tensor::from_i32(&[count], &lens));
        inputs.insert("query_start_loc", Tensor::from_i32(&[count + 1], &starts));
        inputs.insert("block_table", Tensor::from_i32(&[count, table.len() / count.max(1)], &table));
    })?;
    let rows: Vec<_> = (0..material.rows.len()).map(|row| (row, row)).collect();
    let headline = "a row by itself gives another output than among the rows of its request";
    equal::compare(material, &plain, material, &other, &rows, true, headline)
}
