//! Laws of prefill context parallelism: which rank has which row, what it sees, and how rows come back. Integers, so exact.

use shardcheck_cases::{Body, Case, Family, PcpCase};
use shardcheck_engine::PcpDecodes;
use shardcheck_formats::Dtype;

use super::{Property, always, broken};
use crate::finding::{Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory};
use crate::sharing::SharingMaterial;

const PCP: &[Family] = &[Family::Pcp];
const EXACT: &str = "exact: integers";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "pcp.partition",
        statement: "every rank has the rows that the strategy gives it, each once: a prompt's rows are on one rank, a replicated request's on all",
        source: "ATOM `pcp_utils`; SGLang `--cp-strategy`; vLLM `PCPManager`",
        bugs: &["vllm-ascend#10580", "vllm-ascend#5939", "TransformerEngine#1012"],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: partition,
    },
    Property {
        id: "pcp.order",
        statement: "the rows of a chunk are next to each other on their rank, in ascending order",
        source: "a kernel takes a chunk as one sequence with a causal mask",
        bugs: &[],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: order,
    },
    Property {
        id: "pcp.padding",
        statement: "all ranks run as many rows as the fullest one, or as a graph asks for, and padding comes behind a rank's own rows",
        source: "an all-gather takes equal shares",
        bugs: &["vllm-ascend#11807"],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: padding,
    },
    Property {
        id: "pcp.positions",
        statement: "a local row has the position of its row of the batch: tokens computed before plus its place among the new ones",
        source: "positions are computed before the split",
        bugs: &["sglang#27276", "sglang#36297"],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: positions,
    },
    Property {
        id: "pcp.bounds",
        statement: "a local row sees its position plus one tokens, whatever its rank and its place there, and a padding row none",
        source: "every rank has the KV of all positions: the causal edge is global",
        bugs: &["vllm#47181", "sglang#27276", "sglang#36297"],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: bounds,
    },
    Property {
        id: "pcp.restore",
        statement: "on every rank, the gathered rows at the places of `restore` are the batch in its order, without padding",
        source: "vLLM `hidden_restore_idx`; ATOM: gather, transpose, cut",
        bugs: &[],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: restore,
    },
    Property {
        id: "pcp.writer",
        statement: "on every rank, exactly one gathered copy of each row of the batch has its KV written, and no padding",
        source: "vLLM `gathered_kv_write_mask`; full KV on every rank",
        bugs: &["vllm-ascend#6344", "tpu-inference#3344"],
        tolerance: EXACT,
        families: PCP,
        applies: always,
        check: writer,
    },
    Property {
        id: "pcp.balance",
        statement: "decodes that have an owner are spread so that no rank has two more of them than another",
        source: "vLLM `shard_decode_requests`: a decode's rank is its place among the decodes mod P",
        bugs: &[],
        tolerance: EXACT,
        families: PCP,
        applies: owned,
        check: balance,
    },
    Property {
        id: "pcp.groups",
        statement: "two groups that overlap are divided between requests, where half of the rows is reached, on every rank alike; a single request and fewer than two rows a rank are not divided",
        source: "ATOM `_build_pcp_balanced_slices`",
        bugs: &[],
        tolerance: EXACT,
        families: PCP,
        applies: overlaps,
        check: groups,
    },
];

fn overlaps(case: &Case) -> bool {
    pcp_case(case).is_some_and(|pcp| pcp.overlap)
}

fn pcp_case(case: &Case) -> Option<&PcpCase> {
    match &case.body {
        Body::Pcp(pcp) => Some(pcp),
        _ => None,
    }
}

fn owned(case: &Case) -> bool {
    pcp_case(case).is_some_and(|pcp| pcp.decodes == PcpDecodes::Owned)
}

/// `rows`, rank by rank; the width R is the engine's own, as long as all ranks have the same.
pub(super) fn rows(laboratory: &Laboratory) -> Result<Vec<Vec<i64>>, Halt> {
    let material = laboratory.sharing();
    let observed = laboratory.observed()?;
    let given = observed.reply.outputs.find("rows");
    let width = given.and_then(|tensor| tensor.shape().last().copied()).unwrap_or(material.padded);
    let seen = observed.output("rows", Dtype::I64, &[material.world, width])?.to_i64();
    Ok((0..material.world).map(|rank| seen[rank * width..(rank + 1) * width].to_vec()).collect())
}

/// A tensor with a value for each local row, beside the rows; those of padding included.
pub(super) fn beside_rows(
    laboratory: &Laboratory,
    name: &str,
    dtype: Dtype,
) -> Result<Vec<(i64, i64)>, Halt> {
    let rows = rows(laboratory)?;
    let width = rows.first().map_or(0, Vec::len);
    let seen = laboratory.observed()?.output(name, dtype, &[rows.len(), width])?.to_i64();
    Ok(rows.concat().into_iter().zip(seen).collect())
}

/// Judges rows, padding and order of what the engine shows beside another step.
pub(super) fn placed_rows(laboratory: &Laboratory) -> Result<Finding, Halt> {
    must_show(laboratory, "rows")?;
    let mut measured = Measured::exact(0);
    for check in [partition, padding, order] {
        match check(laboratory)? {
            Finding::Holds(more) => measured = measured.and(more),
            other => return Ok(other),
        }
    }
    Ok(Finding::Holds(measured))
}

/// The engine may keep an observable to itself: nothing can be judged by it then.
pub(super) fn must_show(laboratory: &Laboratory, name: &str) -> Result<(), Halt> {
    match laboratory.observed()?.reply.outputs.find(name) {
        Some(_) => Ok(()),
        None => Err(Halt::Unsupported(format!("the engine does not return {name}"))),
    }
}

/// `(place among the rows of all ranks, row of the batch)` of the rows that are no padding, and the rows R of a rank.
pub(super) fn local_rows(laboratory: &Laboratory) -> Result<(Vec<(usize, usize)>, usize), Halt> {
    must_show(laboratory, "rows")?;
    let count = laboratory.sharing().placed.len();
    let rows = rows(laboratory)?;
    let width = rows.first().map_or(0, Vec::len);
    let known =
        |(place, row): (usize, i64)| Some((place, usize::try_from(row).ok().filter(|row| *row < count)?));
    Ok((rows.concat().into_iter().enumerate().filter_map(known).collect(), width))
}

pub(super) fn partition(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let mut compared = 0;
    for (rank, seen) in rows(laboratory)?.into_iter().enumerate() {
        let mut own: Vec<i64> = seen.into_iter().filter(|row| *row != -1).collect();
        own.sort_unstable();
        if let Some(pair) = own.windows(2).find(|pair| pair[0] == pair[1]) {
            let row = material.row_place(pair[0]);
            return Err(broken(format!("rank {rank} has {row} more than once"), Stage::Layout));
        }
        let wanted: Vec<i64> = material.rows_of(rank).into_iter().map(|row| row as i64).collect();
        let extra = own.iter().find(|row| wanted.binary_search(row).is_err());
        if let Some(row) = extra {
            let row = material.row_place(*row);
            return Err(broken(format!("rank {rank} has {row}, which is not its own"), Stage::Layout));
        }
        if let Some(row) = wanted.iter().find(|row| own.binary_search(row).is_err()) {
            let row = material.row_place(*row);
            return Err(broken(format!("rank {rank} lacks {row}"), Stage::Layout));
        }
        compared += wanted.len();
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

pub(super) fn order(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let mut compared = 0;
    for (rank, seen) in rows(laboratory)?.into_iter().enumerate() {
        let own: Vec<usize> = seen
            .iter()
            .filter_map(|row| usize::try_from(*row).ok())
            .filter(|row| *row < material.placed.len())
            .collect();
        let run = |row: usize| material.placed[row].run;
        let mut left = std::collections::HashSet::new();
        for pair in own.windows(2) {
            let (before, after) = (pair[0], pair[1]);
            if run(before) == run(after) && before > after {
                let (before, after) = (material.row_place(before as i64), material.row_place(after as i64));
                let headline = format!("rank {rank} runs {after} of the same chunk behind {before}");
                return Err(broken(headline, Stage::Layout));
            }
            if run(before) != run(after) {
                left.insert(run(before));
            }
            if left.contains(&run(after)) {
                let row = material.row_place(after as i64);
                let headline = format!("rank {rank} runs {row} apart from the rest of its chunk");
                return Err(broken(headline, Stage::Layout));
            }
        }
        compared += own.len();
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

pub(super) fn padding(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let rows = rows(laboratory)?;
    let width = rows.first().map_or(0, Vec::len);
    if width != material.padded {
        let wanted = material.padded;
        return Err(broken(
            format!("a rank runs {width} rows where it is {wanted} that it must"),
            Stage::Layout,
        ));
    }
    for (rank, seen) in rows.iter().enumerate() {
        let of_first = |row: &usize| material.placed[*row].request < material.groups[0];
        let (first, second): (Vec<usize>, Vec<usize>) =
            material.rows_of(rank).into_iter().partition(of_first);
        let behind = material.group_rows[0];
        let is_filled = |at: usize| if at < behind { at < first.len() } else { at - behind < second.len() };
        if let Some((at, row)) = seen.iter().enumerate().find(|(at, row)| (**row != -1) != is_filled(*at)) {
            let own = first.len() + second.len();
            let headline = format!("place {at} of rank {rank}, which has {own} rows, holds {row}");
            return Err(broken(headline, Stage::Layout));
        }
    }
    Ok(Finding::Holds(Measured::exact(rows.len() * width)))
}

/// Compares a value of each local row with one of the oracle's; `None` leaves a row out.
pub(super) fn compare(
    laboratory: &Laboratory,
    (name, dtype): (&'static str, Dtype),
    headline: &str,
    wanted: impl Fn(&SharingMaterial, i64) -> Option<usize>,
) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let beside = beside_rows(laboratory, name, dtype)?;
    let mut comparison = Comparison::new(name);
    for (flat, (row, seen)) in beside.iter().enumerate() {
        if let Some(wanted) = wanted(material, *row) {
            comparison.element(flat, *seen as f64, Allowed::Exactly(wanted as f64));
        }
    }
    let width = (beside.len() / material.world).max(1);
    Ok(comparison.finding(headline, Stage::RowBound, |flat| {
        format!("rank {}, place {}, {}", flat / width, flat % width, material.row_place(beside[flat].0))
    }))
}

pub(super) fn placed(material: &SharingMaterial, row: i64) -> Option<&shardcheck_references::pcp::Placed> {
    usize::try_from(row).ok().and_then(|row| material.placed.get(row))
}

fn positions(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a local row has another position than its row of the batch";
    compare(laboratory, ("positions", Dtype::I64), headline, |material, row| {
        placed(material, row).map(|placed| placed.position)
    })
}

pub(super) fn bounds(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let headline = "a local row sees another number of tokens than its position and what lies before it";
    compare(laboratory, ("row_lens", Dtype::I32), headline, |material, row| {
        Some(placed(material, row).map_or(0, shardcheck_references::pcp::Placed::visible_tokens))
    })
}

fn restore(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let gathered = rows(laboratory)?.concat();
    let (world, count) = (material.world, material.placed.len());
    let seen = laboratory.observed()?.output("restore", Dtype::I64, &[world, count])?.to_i64();
    for (flat, place) in seen.iter().enumerate() {
        let (rank, row) = (flat / count, flat % count);
        let found = usize::try_from(*place).ok().and_then(|place| gathered.get(place));
        if found != Some(&(row as i64)) {
            let there = found.map_or_else(
                || format!("of which there are {}", gathered.len()),
                |found| if *found == -1 { "which is padding".to_owned() } else { material.row_place(*found) },
            );
            let row = material.row_place(row as i64);
            let headline = format!("rank {rank} brings {row} back from gathered row {place}, {there}");
            return Err(broken(headline, Stage::Gather));
        }
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn writer(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let gathered = rows(laboratory)?.concat();
    let (world, count) = (material.world, material.placed.len());
    let seen = laboratory.observed()?.output("kv_writer", Dtype::U8, &[world, gathered.len()])?.to_i64();
    for rank in 0..world {
        let mut written = vec![0usize; count];
        for (place, row) in gathered.iter().enumerate() {
            if seen[rank * gathered.len() + place] == 0 {
                continue;
            }
            match usize::try_from(*row).ok().and_then(|row| written.get_mut(row)) {
                Some(times) => *times += 1,
                None => {
                    let headline =
                        format!("rank {rank} writes the KV of gathered row {place}, which is padding");
                    return Err(broken(headline, Stage::Write));
                }
            }
        }
        if let Some(row) = written.iter().position(|times| *times != 1) {
            let (times, row) = (written[row], material.row_place(row as i64));
            return Err(broken(format!("rank {rank} writes the KV of {row} {times} times"), Stage::Write));
        }
    }
    Ok(Finding::Holds(Measured::exact(world * count)))
}

fn groups(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let seen = laboratory.observed()?.output("groups", Dtype::I32, &[material.world, 2])?.to_i64();
    for (rank, own) in seen.chunks_exact(2).enumerate() {
        let wanted = material.groups.map(|requests| requests as i64);
        if own != wanted {
            let headline = format!("rank {rank} has groups of {own:?} requests, where they are {wanted:?}");
            return Err(broken(headline, Stage::Layout));
        }
    }
    Ok(Finding::Holds(Measured::exact(seen.len())))
}

fn balance(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let material = laboratory.sharing();
    let pcp = pcp_case(laboratory.case).expect("judged on cases of its family");
    let counts: Vec<usize> = rows(laboratory)?
        .iter()
        .map(|seen| {
            let of_decodes =
                seen.iter().filter_map(|row| placed(material, *row)).map(|placed| placed.request);
            let requests: std::collections::BTreeSet<usize> =
                of_decodes.filter(|request| !pcp.requests[*request].is_prefilling).collect();
            requests.len()
        })
        .collect();
    let (least, most) = (counts.iter().min().copied(), counts.iter().max().copied());
    if most.unwrap_or(0) > least.unwrap_or(0) + 1 {
        return Err(broken(format!("the ranks have {counts:?} decodes of their own"), Stage::Layout));
    }
    Ok(Finding::Holds(Measured::exact(counts.len())))
}
