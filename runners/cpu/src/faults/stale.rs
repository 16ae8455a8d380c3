//! Faults that remember: metadata, slot mappings and cache content of earlier steps. None of them shows in a single step.

use super::{Fault, FaultClass};
use crate::memory::{Memory, Metadata, Origin, StepKind, WriteMap};

const STALE: FaultClass = FaultClass::StaleMetadata;
const METADATA: &[&str] = &["sequence.metadata", "sequence.output"];
const OUTPUT: &[&str] = &["sequence.output"];
const WRITES: &[&str] = &["sequence.writers", "sequence.untouched"];
const CONTENT: &[&str] = &["sequence.writers", "sequence.output"];

const fn fault(
    name: &'static str,
    title: &'static str,
    bugs: &'static [&'static str],
    killed_by: &'static [&'static str],
    apply: fn(&mut crate::policies::Policies),
) -> Fault {
    Fault { name, title, class: STALE, bugs, killed_by, apply }
}

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "lengths-of-the-first-step",
        "later steps of a session run with the lengths of the first, as a graph that captured them",
        &["vllm#36070", "ATOM#2102", "vllm-ascend#10895"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, |m, now| with_lens(now, m.first.as_ref())),
    ),
    fault(
        "block-table-of-the-first-step",
        "later steps of a session run with the block table of the first",
        &["vllm-ascend#4221"],
        OUTPUT,
        |p| p.session.recall = |m, now| attending(m, now, |m, now| with_table(now, m.first.as_ref())),
    ),
    fault(
        "rows-of-the-first-step",
        "later steps of a session deal their rows to requests as the first did",
        &["vllm-ascend#11072"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, |m, now| with_starts(now, m.first.as_ref())),
    ),
    fault(
        "lengths-of-the-previous-step",
        "the lengths come one step late, as from a copy that nobody waits for",
        &["vllm-ascend#10032", "vllm#28990"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, |m, now| with_lens(now, m.last.as_ref())),
    ),
    fault(
        "block-table-of-the-previous-step",
        "the block table comes one step late",
        &["vllm-ascend#4221"],
        OUTPUT,
        |p| p.session.recall = |m, now| attending(m, now, |m, now| with_table(now, m.last.as_ref())),
    ),
    fault(
        "lengths-captured-by-bucket",
        "each graph bucket replays the lengths of the step that it was captured with",
        &["vllm#36070", "vllm-ascend#10895"],
        METADATA,
        |p| {
            p.session.recall = |m, now| {
                attending(m, now, |m, now| {
                    let captured = m.by_rows.get(&now.batch.rows);
                    with_lens(now, captured)
                })
            }
        },
    ),
    fault(
        "longest-length-captured",
        "no row sees more than the longest request of the step that was captured",
        &["vllm#28990", "vllm#36070"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, cut_to_the_first),
    ),
    fault(
        "padding-dealt-as-in-a-larger-step",
        "padding rows go on belonging to the requests that a larger step left there",
        &["ATOM#1229", "vllm-ascend#12840"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, padding_of_the_larger_step),
    ),
    fault(
        "draft-lengths-not-rebuilt",
        "a step that goes on from the one before by one token runs with that one's lengths",
        &["vllm-ascend#7549", "vllm-ascend#10878", "vllm-ascend#14236"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, draft_not_rebuilt),
    ),
    fault(
        "draft-block-lengths-of-the-step-before",
        "a draft block sees its request as long as it was in the step before",
        &["vllm-ascend#10878"],
        METADATA,
        |p| {
            p.session.recall = |m, now| {
                attending(m, now, |m, now| if now.causal { now } else { with_lens(now, m.last.as_ref()) })
            }
        },
    ),
    fault(
        "lengths-before-the-rejection",
        "a request is as long as it was before its last tokens were rejected",
        &["vllm-ascend#10032"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, never_shorter),
    ),
    fault(
        "mask-absent-since-capture",
        "a graph captured with one row a request has no mask, and runs without one ever after",
        &["vllm-ascend#11072"],
        METADATA,
        |p| {
            p.session.recall = |m, now| {
                attending(m, now, |m, now| {
                    let maskless = m.first.as_ref().is_some_and(|first| first.batch.max_query_len() <= 1);
                    Metadata { causal: now.causal && !maskless, ..now }
                })
            }
        },
    ),
    fault(
        "buckets-share-a-buffer",
        "after a change of bucket only the first request's length is fresh; the others are those of the other bucket",
        &["ATOM#1902"],
        METADATA,
        |p| p.session.recall = |m, now| attending(m, now, overlaid),
    ),
    fault(
        "last-rank-replays-the-first-lengths",
        "one rank of a group keeps the lengths of the first step while the others refresh them",
        &["vllm-ascend#10895", "vllm#36070"],
        METADATA,
        |p| {
            p.session.recall = |m, now| {
                attending(m, now, |m, now| {
                    let stale = now.world > 1 && now.member + 1 == now.world;
                    if stale { with_lens(now, m.first.as_ref()) } else { now }
                })
            }
        },
    ),
    fault(
        "fork-reads-the-blocks-of-its-source",
        "a block-table row is looked up by its first block, so that a fork reads what its source wrote",
        &["ATOM#1936", "local-inference-lab/vllm#57"],
        OUTPUT,
        |p| p.session.recall = |m, now| attending(m, now, by_first_block),
    ),
    fault(
        "context-lengths-of-the-first-chunk",
        "later chunks of a prefill gather as much context as the first chunk of the session did",
        &["vllm-ascend#11508", "vllm-ascend#10895"],
        METADATA,
        |p| {
            p.session.recall =
                |m, now| of_kind(StepKind::Context, m, now, |m, now| with_lens(now, m.first.as_ref()))
        },
    ),
    fault(
        "context-lengths-of-the-previous-step",
        "the context lengths come one step late",
        &["vllm-ascend#10895"],
        METADATA,
        |p| {
            p.session.recall =
                |m, now| of_kind(StepKind::Context, m, now, |m, now| with_lens(now, m.last.as_ref()))
        },
    ),
    fault(
        "context-table-of-the-previous-step",
        "the context is gathered through the block table of the prefill before",
        &["vllm-ascend#4221"],
        OUTPUT,
        |p| {
            p.session.recall =
                |m, now| of_kind(StepKind::Context, m, now, |m, now| with_table(now, m.last.as_ref()))
        },
    ),
    fault(
        "layout-mirror-one-step-late",
        "the layout is derived from the lengths of the step before, as a host copy that is not refreshed in time",
        &["vllm#28990", "ATOM#2102"],
        &["sequence.metadata"],
        |p| {
            p.session.recall =
                |m, now| of_kind(StepKind::Layout, m, now, |m, now| with_lens(now, m.last.as_ref()))
        },
    ),
    fault(
        "slots-of-the-earlier-batch",
        "a write of as many tokens as the one before goes to the same slots",
        &["vllm-ascend#4221"],
        WRITES,
        |p| {
            replayed(p);
            p.session.recall_write = |m, now| {
                let earlier = m.last_write.clone().filter(|old| old.positions.len() == now.positions.len());
                written(m, now, |now| earlier.unwrap_or(now))
            };
        },
    ),
    fault(
        "padding-written-as-in-a-larger-step",
        "the padding rows of a write go to the slots that a larger step left there",
        &["vllm-ascend#12840", "ATOM#1229"],
        WRITES,
        |p| {
            replayed(p);
            p.session.recall_write = |m, now| {
                let earlier = m.last_write.clone();
                written(m, now, |now| padding_of_the_larger_write(earlier.as_ref(), now))
            };
        },
    ),
    fault(
        "write-table-of-the-previous-step",
        "tokens are written through the block table of the step before",
        &["vllm-ascend#4221"],
        WRITES,
        |p| {
            replayed(p);
            p.session.recall_write = |m, now| {
                let earlier = m.last_write.clone();
                written(m, now, |mut now| {
                    for request in 0..earlier.as_ref().map_or(0, |old| old.table.requests()) {
                        if request < now.table.requests() {
                            now.table.replace(
                                request,
                                earlier.as_ref().map_or(&[], |old| old.table.entries(request)),
                            );
                        }
                    }
                    now
                })
            };
        },
    ),
    fault(
        "fork-writes-into-the-blocks-of-its-source",
        "a block-table row is looked up by its first block, so that a fork writes over what its source wrote",
        &["ATOM#1936", "local-inference-lab/vllm#57"],
        WRITES,
        |p| {
            p.session.recall = |m, now| attending(m, now, |_, now| now);
            p.session.recall_write = |m, mut now| {
                for request in 0..now.table.requests() {
                    if let Some(row) = first_block(now.table.entries(request)).and_then(|b| m.tables.get(&b))
                    {
                        now.table.replace(request, row);
                    }
                }
                now
            };
        },
    ),
    fault(
        "rejected-token-kept",
        "a slot that holds a token of the position already is not written again: a rejected token stays",
        &["vllm-ascend#10032"],
        &["sequence.writers", "sequence.output", "stack.attention"],
        |p| p.session.overwrites = |m, slot, origin| m.origins.insert(slot, origin) != Some(origin),
    ),
    fault(
        "freed-block-keeps-its-content",
        "a slot that another request wrote before it was freed is taken for a prefix that is cached",
        &["ATOM#1936"],
        CONTENT,
        |p| p.session.overwrites = another_request_was_first,
    ),
    Fault {
        name: "one-rank-keeps-out-of-the-gather-of-a-larger-step",
        title: "one rank decides by the rows of the first step whether it enters the gather of the queries",
        class: FaultClass::Hang,
        bugs: &["vllm-ascend#11072"],
        killed_by: &["sequence.collectives"],
        apply: |p| {
            p.session.recall = |m, now| {
                attending(m, now, |m, now| {
                    let larger = m.first.as_ref().is_some_and(|first| first.batch.rows < now.batch.rows);
                    let enters_gather = !(larger && now.member + 1 == now.world);
                    Metadata { enters_gather, ..now }
                })
            }
        },
    },
];

/// Runs an attention step with what `mix` makes of it, and keeps the metadata that were given.
fn attending(memory: &mut Memory, now: Metadata, mix: fn(&Memory, Metadata) -> Metadata) -> Metadata {
    of_kind(StepKind::Attend, memory, now, mix)
}

fn of_kind(
    kind: StepKind,
    memory: &mut Memory,
    now: Metadata,
    mix: fn(&Memory, Metadata) -> Metadata,
) -> Metadata {
    if now.kind != kind {
        return now;
    }
    let given = now.clone();
    let mixed = mix(memory, now);
    for request in 0..given.batch.seq_lens.len() {
        let entries = given.batch.table.entries(request);
        if let Some(block) = first_block(entries) {
            // a source keeps its row: the first one to be seen with a block
            memory.tables.entry(block).or_insert_with(|| entries.to_vec());
        }
    }
    memory.first.get_or_insert_with(|| given.clone());
    memory.by_rows.entry(given.batch.rows).or_insert_with(|| given.clone());
    memory.last = Some(given);
    mixed
}

fn first_block(entries: &[i64]) -> Option<i64> {
    entries.first().copied().filter(|block| *block >= 0)
}

/// The lengths of an earlier step for the requests that it had.
fn with_lens(mut now: Metadata, earlier: Option<&Metadata>) -> Metadata {
    let lens = earlier.map_or(&[][..], |old| &old.batch.seq_lens);
    now.batch.seq_lens.iter_mut().zip(lens).for_each(|(len, old)| *len = *old);
    now
}

/// The table of an earlier step for the requests and entries that it had.
fn with_table(mut now: Metadata, earlier: Option<&Metadata>) -> Metadata {
    let Some(old) = earlier else { return now };
    for request in 0..now.batch.table.requests().min(old.batch.table.requests()) {
        now.batch.table.replace(request, old.batch.table.entries(request));
    }
    now
}

fn with_starts(mut now: Metadata, earlier: Option<&Metadata>) -> Metadata {
    let Some(old) = earlier.filter(|old| old.batch.starts.len() >= now.batch.starts.len()) else {
        return now;
    };
    let (rows, edges) = (now.batch.rows as i32, now.batch.starts.len());
    now.batch.starts = old.batch.starts[..edges].iter().map(|edge| (*edge).min(rows)).collect();
    now
}

fn cut_to_the_first(memory: &Memory, mut now: Metadata) -> Metadata {
    let longest = memory.first.as_ref().and_then(|first| first.batch.seq_lens.iter().max().copied());
    now.batch.seq_lens.iter_mut().for_each(|len| *len = (*len).min(longest.unwrap_or(*len)));
    now
}

/// The last request's rows go on as far as those of the step before did.
fn padding_of_the_larger_step(memory: &Memory, mut now: Metadata) -> Metadata {
    let Some(last) = &memory.last else { return now };
    let (real, left) = (now.batch.real_rows(), last.batch.real_rows().min(now.batch.rows));
    let has_rows = now.batch.starts.windows(2).last().is_some_and(|edge| edge[1] > edge[0]);
    if left > real && has_rows {
        let last = now.batch.starts.len() - 1;
        now.batch.starts[last] = left as i32;
    }
    now
}

fn draft_not_rebuilt(memory: &Memory, now: Metadata) -> Metadata {
    let goes_on = |last: &&Metadata| {
        let grown = last.batch.seq_lens.iter().map(|len| len + 1);
        last.batch.starts == now.batch.starts && grown.eq(now.batch.seq_lens.iter().copied())
    };
    let last = memory.last.as_ref().filter(goes_on);
    with_lens(now, last)
}

/// A request is told by its first block.
fn never_shorter(memory: &Memory, mut now: Metadata) -> Metadata {
    let Some(last) = &memory.last else { return now };
    for request in 0..now.batch.seq_lens.len() {
        let block = first_block(now.batch.table.entries(request));
        let same = |old: &usize| block.is_some() && first_block(last.batch.table.entries(*old)) == block;
        if let Some(old) = (0..last.batch.seq_lens.len()).find(same) {
            now.batch.seq_lens[request] = now.batch.seq_lens[request].max(last.batch.seq_lens[old]);
        }
    }
    now
}

fn overlaid(memory: &Memory, mut now: Metadata) -> Metadata {
    let Some(last) = memory.last.as_ref().filter(|last| last.batch.rows != now.batch.rows) else {
        return now;
    };
    let lens = now.batch.seq_lens.iter_mut().zip(&last.batch.seq_lens).skip(1);
    lens.for_each(|(len, old)| *len = *old);
    now
}

fn by_first_block(memory: &Memory, mut now: Metadata) -> Metadata {
    for request in 0..now.batch.seq_lens.len() {
        let row = first_block(now.batch.table.entries(request)).and_then(|block| memory.tables.get(&block));
        if let Some(row) = row {
            now.batch.table.replace(request, row);
        }
    }
    now
}

/// The attention that follows a write makes its slot mapping the one that is replayed.
fn replayed(policies: &mut crate::policies::Policies) {
    policies.session.recall = |memory, now| {
        if now.kind != StepKind::Layout {
            memory.last_write = memory.pending_write.take().or(memory.last_write.take());
        }
        now
    };
}

/// Writes with what `mix` makes of the mapping, and keeps the one that was given.
fn written(memory: &mut Memory, now: WriteMap, mix: impl FnOnce(WriteMap) -> WriteMap) -> WriteMap {
    memory.pending_write = Some(now.clone());
    mix(now)
}

fn padding_of_the_larger_write(earlier: Option<&WriteMap>, mut now: WriteMap) -> WriteMap {
    let Some(old) = earlier else { return now };
    for token in 0..now.requests.len().min(old.requests.len()) {
        let request = old.requests[token];
        let exists = usize::try_from(request).is_ok_and(|request| request < now.table.requests());
        if now.requests[token] < 0 && exists {
            (now.requests[token], now.positions[token]) = (request, old.positions[token]);
        }
    }
    now
}

/// Whether nobody but this request has written the slot.
fn another_request_was_first(memory: &mut Memory, slot: usize, origin: Origin) -> bool {
    let first = *memory.origins.entry(slot).or_insert(origin);
    first.0 == origin.0
}

#[cfg(test)]
mod tests;
