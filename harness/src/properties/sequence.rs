//! Sequences of steps in one session: what was true of an earlier step must not leak into a later one.

use shardcheck_cases::{Body, Case, Family, RunKind, Step};
use shardcheck_engine::Reply;
use shardcheck_formats::Dtype;

use super::{Property, always, attend};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::judge::{Allowed, Comparison};
use crate::laboratory::{Halt, Laboratory, Observed};
use crate::localise;
use crate::sequence::{Owners, Play, Seen, SequenceMaterial, TurnMaterial, Written};

const SEQUENCE: &[Family] = &[Family::Sequence];

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "sequence.metadata",
        statement: "at every step of a session the lengths, slots and rows that each rank derives are those of this step's batch",
        source: "ATOM `get_dcp_local_seq_lens`, `get_dcp_local_window_lens`; captured metadata must be refreshed by every step",
        bugs: &[
            "vllm#36070",
            "vllm-ascend#10032",
            "vllm-ascend#7549",
            "vllm-ascend#10878",
            "vllm#28990",
            "ATOM#2102",
        ],
        tolerance: "exact: integers",
        families: SEQUENCE,
        applies: one_group,
        check: |laboratory| every_turn(laboratory, metadata),
    },
    Property {
        id: "sequence.writers",
        statement: "at every step of a session each new token is written by exactly one rank of a group, its owner, into the slot of its position",
        source: "vLLM `cp_local_slot`, PAD_SLOT_ID; a rejected token's slot is written again",
        bugs: &["vllm-ascend#4221", "vllm-ascend#10032", "ATOM#1936"],
        tolerance: "exact: slots, and codes of the cache format",
        families: SEQUENCE,
        applies: one_group,
        check: |laboratory| every_turn(laboratory, writers),
    },
    Property {
        id: "sequence.untouched",
        statement: "a step changes no slot but those of its own new tokens, neither a shared block's nor a freed one's",
        source: "a write must not disturb other requests' tokens; attention writes nothing",
        bugs: &["vllm-ascend#12840", "ATOM#1229", "ATOM#1936", "local-inference-lab/vllm#57"],
        tolerance: "exact: bytes of the caches before and after each step",
        families: SEQUENCE,
        applies: one_group,
        check: |laboratory| every_turn(laboratory, untouched),
    },
    Property {
        id: "sequence.transfer",
        statement: "every token of a cache that comes from a session of another layout lies, byte for byte, in the slot that its position has here, and every other slot is as it was",
        source: "vLLM `cp_local_slot` for the layouts of both sessions; a transfer moves tokens and computes nothing",
        bugs: &["vllm#49962", "vllm-ascend#16492", "ATOM#1994", "sglang#33309"],
        tolerance: "exact: bytes",
        families: SEQUENCE,
        applies: imports,
        check: |laboratory| every_turn(laboratory, transfer),
    },
    Property {
        id: "sequence.collectives",
        statement: "at every step all ranks enter the same number of collectives, and as many as in any other step of the same kind",
        source: "a rank that decides by what an earlier step left behind leaves the others waiting",
        bugs: &["vllm-ascend#11072"],
        tolerance: "exact: integers; a stall names the waiting rank",
        families: SEQUENCE,
        applies: always,
        check: collectives,
    },
    Property {
        id: "sequence.output",
        statement: "every step of a session gives global attention over the tokens that its requests hold then, on all ranks, and exact zeros in padding rows",
        source: "softmax attention; a session's answer does not depend on how its requests came to their tokens",
        bugs: &[
            "vllm#36070",
            "ATOM#2102",
            "ATOM#1902",
            "ATOM#1936",
            "vllm-ascend#4221",
            "vllm-ascend#11072",
            "vllm-ascend#10895",
            "vllm-ascend#10878",
            "vllm-ascend#10032",
            "vllm-ascend#11508",
        ],
        tolerance: "certified interval of the declared rounding contract, per element, and its LSE bound",
        families: SEQUENCE,
        applies: one_group,
        check: |laboratory| every_turn(laboratory, output),
    },
    Property {
        id: "sequence.group-metadata",
        statement: "in a session of two KV groups each derives its lengths, slots and rows from its own layout, although the batch is the same",
        source: "vLLM `KVCacheGroupSpec`: a group has a block size and a block table of its own; a replicated group has a world of one",
        bugs: &["local-inference-lab/vllm#57", "vllm#45340", "vllm-ascend#14236"],
        tolerance: "exact: integers",
        families: SEQUENCE,
        applies: two_groups,
        check: |laboratory| every_turn(laboratory, metadata),
    },
    Property {
        id: "sequence.group-writers",
        statement: "in a session of two KV groups each token is written by the owner in the sharded one and by every rank in the replicated one, into the slot of the group's own block table",
        source: "vLLM `cp_local_slot` for each group's layout",
        bugs: &["vllm-ascend#7549", "vllm-ascend#4221", "tpu-inference#3344"],
        tolerance: "exact: slots, and codes of the cache format",
        families: SEQUENCE,
        applies: two_groups,
        check: |laboratory| every_turn(laboratory, writers),
    },
    Property {
        id: "sequence.group-untouched",
        statement: "in a session of two KV groups a step changes no slot but those of its own new tokens, in either group",
        source: "groups have caches of their own",
        bugs: &["vllm-ascend#7549", "vllm-ascend#4221"],
        tolerance: "exact: bytes of both groups' caches before and after each step",
        families: SEQUENCE,
        applies: two_groups,
        check: |laboratory| every_turn(laboratory, untouched),
    },
    Property {
        id: "sequence.group-output",
        statement: "in a session of two KV groups every step of each gives global attention over the tokens that the group's own cache holds",
        source: "softmax attention; one group's metadata say nothing of the other's",
        bugs: &["vllm#55600", "vllm#49962", "vllm-ascend#10878", "local-inference-lab/vllm#57"],
        tolerance: "certified interval of the declared rounding contract, per element, and its LSE bound",
        families: SEQUENCE,
        applies: two_groups,
        check: |laboratory| every_turn(laboratory, output),
    },
];

/// Whether requests come from other sessions.
fn imports(case: &Case) -> bool {
    matches!(&case.body, Body::Sequence(body) if body.steps.iter().any(|step| matches!(step, Step::Import { .. })))
}

fn two_groups(case: &Case) -> bool {
    matches!(&case.body, Body::Sequence(body) if body.configuration.second_group.is_some())
}

fn one_group(case: &Case) -> bool {
    !two_groups(case)
}

/// One turn of a sequence, with what came before it.
struct At<'a> {
    material: &'a SequenceMaterial,
    play: &'a Play,
    turn: usize,
    owners: &'a Owners,
}

impl<'a> At<'a> {
    fn expected(&self) -> &'a TurnMaterial {
        &self.material.turns[self.turn]
    }

    fn seen(&self) -> &'a Seen {
        &self.play.seen[self.turn]
    }

    fn headline(&self, what: &str) -> String {
        format!("{}: {what}", self.material.name(self.turn))
    }

    /// The finding of a comparison, placed by `place`.
    fn finding(
        &self,
        comparison: &Comparison,
        what: &str,
        stage: Stage,
        place: impl Fn(usize) -> String,
    ) -> Finding {
        if comparison.holds() {
            return Finding::Holds(comparison.measured());
        }
        let mut failure = comparison.failure(&self.headline(what), stage, place);
        failure.notes.push(self.material.batch(self.turn));
        Finding::Broken(Box::new(failure))
    }
}

/// Judges one turn of a KV group.
type Check = fn(&At) -> Result<Finding, Halt>;

/// Judges turn by turn and ends with the first that fails; a session that came to an early end is judged as far as it came.
fn every_turn(laboratory: &Laboratory, check: Check) -> Result<Finding, Halt> {
    let (material, play) = (laboratory.sequence(), laboratory.played()?);
    let mut measured = Measured::default();
    let mut owners = [Owners::default(), Owners::default()];
    for turn in 0..play.seen.len() {
        for (material, play) in material.groups().zip(play.groups()) {
            if turn >= play.seen.len() {
                continue; // the session ended between the groups
            }
            let owners = &mut owners[material.group];
            match check(&At { material, play, turn, owners })? {
                Finding::Holds(more) => measured = measured.and(more),
                broken => return Ok(broken),
            }
            material.turns[turn].imports.iter().for_each(|import| owners.take(&import.written));
            owners.take(&material.turns[turn].written);
        }
    }
    play.halt.clone().map_or(Ok(Finding::Holds(measured)), Err)
}

/// Everything that is judged of one turn of a session, in all of its KV groups.
#[cfg(test)]
pub(crate) fn judge_turn(material: &SequenceMaterial, play: &Play, turn: usize) -> Result<Finding, Halt> {
    let owners = Owners::default();
    let checks: [Check; 5] = [transfer, metadata, writers, untouched, output];
    let groups = material.groups().zip(play.groups());
    all(groups.flat_map(|(material, play)| {
        let at = At { material, play, turn, owners: &owners };
        checks.map(|check| check(&at))
    }))
}

/// The first of several findings that does not hold, or all of them together.
fn all(findings: impl IntoIterator<Item = Result<Finding, Halt>>) -> Result<Finding, Halt> {
    let mut measured = Measured::default();
    for finding in findings {
        match finding? {
            Finding::Holds(more) => measured = measured.and(more),
            broken => return Ok(broken),
        }
    }
    Ok(Finding::Holds(measured))
}

fn output(at: &At) -> Result<Finding, Halt> {
    let (expected, seen) = (&at.expected().attention, &at.seen().attend);
    let shape = expected.output_shape();
    let axes = [("rank", shape[0]), ("row", shape[1]), ("head", shape[2]), ("dim", shape[3])];
    let outs = attend::compare_output(expected, seen)?;
    let lses = attend::compare_lse(expected, seen)?;
    if outs.holds() && lses.holds() {
        return Ok(Finding::Holds(outs.measured().and(lses.measured())));
    }
    let (wrong, axes, what) = if outs.holds() {
        (&lses, &axes[..3], "a merged LSE is not that of global attention")
    } else {
        (&outs, &axes[..], "an output is not global attention")
    };
    let per_row = axes[2..].iter().map(|axis| axis.1).product();
    let mut failure = wrong.failure(&at.headline(what), stage_of(at), |flat| expected.place(flat, axes));
    failure.notes.push(at.material.batch(at.turn));
    failure.notes.extend(localise::notes(expected, wrong, per_row));
    Ok(Finding::Broken(Box::new(failure)))
}

/// The first of the stages that can be looked at that went wrong in a step.
fn stage_of(at: &At) -> Stage {
    let fails = |finding: Result<Finding, Halt>| matches!(finding, Ok(Finding::Broken(_)));
    if fails(metadata(at)) {
        return Stage::RowBound;
    }
    if fails(writers(at)) || fails(untouched(at)) {
        return Stage::Write;
    }
    Stage::Output
}

fn metadata(at: &At) -> Result<Finding, Halt> {
    let expected = &at.expected().attention;
    let (ranks, rows) = (expected.ranks(), expected.rows.len());
    if at.expected().turn.kind == RunKind::Prefill {
        return all([derived(at), chunk_lengths(at)]);
    }
    let row_lens = match localise::row_lengths(expected, &at.seen().attend) {
        Err(Halt::Unsupported(_)) if at.seen().layout.is_some() => Ok(Finding::Holds(Measured::default())),
        Err(halt) => Err(halt),
        Ok(comparison) => {
            let place = |flat| expected.place(flat, &[("rank", ranks), ("row", rows)]);
            Ok(at.finding(
                &comparison,
                "a row sees another number of tokens on a rank",
                Stage::RowBound,
                place,
            ))
        }
    };
    all([derived(at), row_lens])
}

/// The layout that the engine derives in the middle of a session.
fn derived(at: &At) -> Result<Finding, Halt> {
    let Some(seen) = &at.seen().layout else { return Ok(Finding::Holds(Measured::default())) };
    let expected = &at.expected().attention;
    let requests = &expected.case.workload.requests;
    let (mut lens, mut slots) = (Vec::new(), Vec::new());
    for rank in 0..expected.ranks() {
        let member = expected.dcp_rank(rank);
        for (index, request) in requests.iter().enumerate() {
            lens.push(expected.layout.local_len(request.seq_len(), member) as i64);
            let table = expected.block_table(index);
            slots
                .extend((0..request.seq_len()).map(|position| expected.layout.slot(position, member, table)));
        }
    }
    let names = [
        ("local_lens", Dtype::I32, requests.len(), lens, "a rank's local length"),
        ("slots", Dtype::I64, expected.case.workload.total_tokens(), slots, "a position's slot"),
    ];
    all(names.into_iter().map(|(name, dtype, width, wanted, what)| {
        let found = seen.output(name, dtype, &[expected.ranks(), width])?.to_i64();
        let comparison = Comparison::integers(name, &found, &wanted);
        let what = format!("{what} is not that of this step");
        let place = |flat: usize| format!("rank {}, entry {}", flat / width.max(1), flat % width.max(1));
        Ok(at.finding(&comparison, &what, Stage::Layout, place))
    }))
}

/// Context tokens of each request over all chunks of a gather.
fn chunk_lengths(at: &At) -> Result<Finding, Halt> {
    let expected = &at.expected().attention;
    let Some(tensor) = at.seen().attend.reply.outputs.find("chunk_lens") else {
        return Ok(Finding::Holds(Measured::default()));
    };
    let (ranks, requests) = (expected.ranks(), &expected.case.workload.requests);
    let &[_, chunks, _] = tensor.shape() else {
        return Err(Failure::because(at.headline("chunk_lens does not have three axes"))
            .at(Stage::Gather)
            .into());
    };
    let found = at.seen().attend.output("chunk_lens", Dtype::I32, &[ranks, chunks, requests.len()])?.to_i64();
    let mut comparison = Comparison::new("chunk_lens");
    for rank in 0..ranks {
        for (index, request) in requests.iter().enumerate() {
            let of_chunk = |chunk: usize| found[(rank * chunks + chunk) * requests.len() + index];
            let sum: i64 = (0..chunks).map(of_chunk).sum();
            let wanted = Allowed::Exactly(request.context_tokens as f64);
            comparison.element(rank * requests.len() + index, sum as f64, wanted);
        }
    }
    let what = "the chunks of a request do not add up to its context";
    let place = |flat: usize| {
        format!("rank {}, request {} of the batch", flat / requests.len(), flat % requests.len())
    };
    Ok(at.finding(&comparison, what, Stage::Gather, place))
}

fn writers(at: &At) -> Result<Finding, Halt> {
    let (expected, seen) = (at.expected(), at.seen());
    let ranks = expected.attention.ranks();
    let tokens = expected.written.slots.len() / ranks;
    let reported = match seen.write.observable("slots", Dtype::I64, &[ranks, tokens]) {
        Err(Halt::Unsupported(why)) if seen.caches.is_none() => return Err(Halt::Unsupported(why)),
        Err(Halt::Unsupported(_)) => Finding::Holds(Measured::default()),
        Err(halt) => return Err(halt),
        Ok(tensor) => {
            let comparison = Comparison::integers("slots", &tensor.to_i64(), &expected.written.slots);
            let place = |flat: usize| format!("rank {}, token {} of the write", flat / tokens, flat % tokens);
            at.finding(
                &comparison,
                "a token is written by the wrong rank or to the wrong slot",
                Stage::Write,
                place,
            )
        }
    };
    let Some(caches) = &seen.caches else { return Ok(reported) };
    all([Ok(reported), stored(at, &expected.written, caches, "a token in the cache is not what was written")])
}

/// The codes of tokens in their slots.
fn stored(at: &At, written: &Written, caches: &Reply, what: &str) -> Result<Finding, Halt> {
    let configuration = &at.material.case.configuration;
    let slots = configuration.blocks * configuration.block_size;
    all(written.codes.iter().map(|(name, codes)| {
        let found = cache(caches, name, at)?.to_codes();
        let mut comparison = Comparison::new(name);
        for (index, store) in written.stores.iter().enumerate() {
            let wanted = &codes[store.token];
            let base = (store.rank * slots + store.slot) * wanted.len();
            for (element, code) in wanted.iter().enumerate() {
                let flat = index * wanted.len() + element;
                comparison.element(flat, found[base + element] as f64, Allowed::Exactly(*code as f64));
            }
        }
        let place = |flat: usize| {
            let width = codes.first().map_or(1, Vec::len);
            let store = &written.stores[flat / width];
            format!(
                "rank {}, slot {}, position {} of request {}, element {} (codes shown)",
                store.rank,
                store.slot,
                store.position,
                store.request,
                flat % width
            )
        };
        Ok(at.finding(&comparison, what, Stage::Write, place))
    }))
}

/// A cache of a reply, its dtype and shape checked.
fn cache(reply: &Reply, name: &str, at: &At) -> Result<shardcheck_engine::Tensor, Halt> {
    let expected = &at.expected().attention;
    let observed = Observed::of(reply.clone());
    observed.output(name, expected.configuration().kv_dtype, &expected.cache_shape(name)).cloned()
}

const NO_CACHES: &str = "the engine does not give its caches back";

fn untouched(at: &At) -> Result<Finding, Halt> {
    let (Some(before), Some(after)) = (at.play.caches_before(at.turn), &at.seen().caches) else {
        return Err(Halt::Unsupported(NO_CACHES.to_owned()));
    };
    let headline = |what: &str| at.headline(&format!("{what}; no token of the step belongs there"));
    unchanged(at, &at.expected().written, before, after, headline)
}

/// Every slot but those of `written`, byte by byte.
fn unchanged(
    at: &At,
    written: &Written,
    before: &Reply,
    after: &Reply,
    headline: impl Fn(&str) -> String,
) -> Result<Finding, Halt> {
    let (expected, configuration) = (at.expected(), &at.material.case.configuration);
    let slots = configuration.blocks * configuration.block_size;
    let own: std::collections::HashSet<(usize, usize)> =
        written.stores.iter().map(|store| (store.rank, store.slot)).collect();
    let mut compared = 0;
    for (name, _) in &written.codes {
        let (before, after) =
            (cache(before, name, at)?.to_contiguous(), cache(after, name, at)?.to_contiguous());
        let size = before.bytes().len() / (expected.attention.ranks() * slots);
        let pairs = before.bytes().chunks_exact(size).zip(after.bytes().chunks_exact(size));
        for (index, (before, after)) in pairs.enumerate() {
            let (rank, slot) = (index / slots, index % slots);
            if own.contains(&(rank, slot)) {
                continue;
            }
            compared += 1;
            if before != after {
                let (block, held) = (slot / configuration.block_size, at.owners.name(rank, slot));
                let what = format!("{name}: slot {slot} of rank {rank} (block {block}) changed, {held}");
                return Err(Failure::because(headline(&what))
                    .at(Stage::Write)
                    .note(at.material.batch(at.turn))
                    .into());
            }
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}

fn transfer(at: &At) -> Result<Finding, Halt> {
    let imports = &at.expected().imports;
    all(imports.iter().enumerate().map(|(index, import)| {
        let before = at.play.caches_before_import(at.turn, index);
        let (Some(before), Some(after)) = (before, &at.seen().imported[index]) else {
            return Err(Halt::Unsupported(NO_CACHES.to_owned()));
        };
        let name = at.material.import_name(at.turn, index);
        let placed = format!("{name} before it: a token that was taken over is not the source's");
        let headline = |what: &str| format!("{name}: {what}; no token of the source belongs there");
        all([
            stored(at, &import.written, after, &placed),
            unchanged(at, &import.written, before, after, headline),
        ])
    }))
}

fn collectives(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let (material, play) = (laboratory.sequence(), laboratory.played()?);
    let groups = material.groups().zip(play.groups());
    match all(groups.map(|(material, play)| collectives_of(material, play)))? {
        Finding::Holds(measured) => play.halt.clone().map_or(Ok(Finding::Holds(measured)), Err),
        broken => Ok(broken),
    }
}

/// The collectives of one KV group.
fn collectives_of(material: &SequenceMaterial, play: &Play) -> Result<Finding, Halt> {
    let mut of_kind: Vec<(RunKind, u64, usize)> = Vec::new();
    let mut compared = 0;
    for (turn, seen) in play.seen.iter().enumerate() {
        let (counts, kind) = (&seen.attend.reply.collectives, material.turns[turn].turn.kind);
        if counts.len() != material.case.configuration.tp {
            return Err(Halt::Unsupported("the engine does not count its collectives".to_owned()));
        }
        let broken = |what: String| {
            let headline = format!("{}: {what}", material.name(turn));
            Err(Failure::because(headline).at(Stage::Exchange).note(material.batch(turn)).into())
        };
        if counts.iter().any(|count| *count != counts[0]) {
            return broken(format!("ranks entered {counts:?} collectives"));
        }
        compared += counts.len();
        // a prefill gathers once for each chunk
        if kind == RunKind::Prefill {
            continue;
        }
        match of_kind.iter().find(|(known, ..)| *known == kind) {
            None => of_kind.push((kind, counts[0], turn)),
            Some((_, count, first)) if *count != counts[0] => {
                let earlier = material.name(*first);
                return broken(format!("{} collectives, but {count} in {earlier}", counts[0]));
            }
            Some(_) => {}
        }
    }
    Ok(Finding::Holds(Measured::exact(compared)))
}
