//! Faults of Kimi delta attention: the wrong slot, row, gate or order.

use super::{Fault, FaultClass};
use crate::kda::{length, log_decay, normed, sigmoid, softplus};
use shardcheck_engine::KdaGate;

/// A value in 16 bits.
fn coarse(x: f32) -> f32 {
    shardcheck_formats::round_bf16(x)
}

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "kda-fork-reads-the-slot-it-writes",
        title: "a request that goes on from another slot reads the one that it writes, with what a request before it left there",
        class: FaultClass::StaleMetadata,
        bugs: &["ATOM#1936"],
        killed_by: &["kda.fork", "kda.state", "kda.window"],
        apply: |p| p.kda.source = |read, write| read.map(|_| write),
    },
    Fault {
        name: "kda-new-request-reads-its-slot",
        title: "a new request goes on from what a request before it left in its slot",
        class: FaultClass::StaleMetadata,
        bugs: &["ATOM#1936"],
        killed_by: &["kda.fresh", "kda.output", "kda.state", "kda.window"],
        apply: |p| p.kda.source = |read, write| Some(read.unwrap_or(write)),
    },
    Fault {
        name: "kda-request-starts-anew",
        title: "every step starts from zeros",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["kda.split", "kda.output", "kda.state"],
        apply: |p| p.kda.source = |_, _| None,
    },
    Fault {
        name: "kda-rejected-rows-stay",
        title: "a request goes on behind all rows of its last step, rejected ones included",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["kda.rollback", "kda.output", "kda.state"],
        apply: |p| p.kda.kept = [|_, rows| rows; 2],
    },
    Fault {
        name: "kda-window-keeps-rejected-rows",
        title: "the state is taken back behind rejected rows, the window of the convolution is not",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["kda.rollback", "kda.output"],
        apply: |p| p.kda.kept = [|accepted, _| accepted, |_, rows| rows],
    },
    Fault {
        name: "kda-rollback-one-row-too-far",
        title: "where rows were rejected, the last one that counts is taken back too",
        class: FaultClass::SpecDecode,
        bugs: &[],
        killed_by: &["kda.rollback", "kda.state"],
        apply: |p| {
            p.kda.kept =
                [|accepted, rows| if accepted < rows { accepted.saturating_sub(1) } else { accepted }; 2]
        },
    },
    Fault {
        name: "kda-step-reads-what-it-writes",
        title: "a request reads a slot that an earlier one of the same step has written already",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["kda.fork", "kda.state"],
        apply: |p| p.kda.sees_writes = true,
    },
    Fault {
        name: "kda-empty-request-is-not-copied",
        title: "a request without rows leaves nothing in the slot that it writes",
        class: FaultClass::EmptyShard,
        bugs: &[],
        killed_by: &["kda.state", "kda.window"],
        apply: |p| p.kda.moves_empty = false,
    },
    Fault {
        name: "kda-empty-request-shifts-the-others",
        title: "rows are listed without empty requests and looked up with them, so that those behind an empty one get the next one's rows",
        class: FaultClass::EmptyShard,
        bugs: &["vllm-ascend#11807"],
        killed_by: &["kda.output", "kda.state"],
        apply: |p| {
            p.kda.segments = |starts| {
                let (mut filled, empty): (Vec<_>, Vec<_>) =
                    starts.windows(2).map(|pair| pair[0]..pair[1]).partition(|rows| !rows.is_empty());
                filled.extend(empty);
                filled
            }
        },
    },
    Fault {
        name: "kda-window-is-not-carried",
        title: "every step begins with an empty window of the convolution",
        class: FaultClass::StaleMetadata,
        bugs: &[],
        killed_by: &["kda.split", "kda.output"],
        apply: |p| p.kda.carried = |_| 0.0,
    },
    Fault {
        name: "kda-taps-newest-first",
        title: "the first tap of the convolution is taken for the token's own",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["kda.output", "kda.core"],
        apply: |p| p.kda.tap = |age, taps| taps - 1 - age,
    },
    Fault {
        name: "kda-convolution-without-silu",
        title: "nothing is done to the output of the convolution",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output", "kda.core"],
        apply: |p| p.kda.activation = |x| x,
    },
    Fault {
        name: "kda-keys-not-normalised",
        title: "keys are used as they leave the convolution",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output", "kda.core", "kda.state"],
        apply: |p| p.kda.length = [length, |_| 1.0],
    },
    Fault {
        name: "kda-query-without-scale",
        title: "queries are not scaled, which the norm behind them hides",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.core"],
        apply: |p| p.kda.scale = |_| 1.0,
    },
    Fault {
        name: "kda-value-heads-interleaved",
        title: "value head h uses query and key head h mod H",
        class: FaultClass::HeadLayout,
        bugs: &[],
        killed_by: &["kda.output", "kda.core", "kda.ranks"],
        apply: |p| p.kda.group = |head, _, heads| head % heads,
    },
    Fault {
        name: "kda-every-rank-has-the-first-heads",
        title: "every rank runs the heads of rank 0",
        class: FaultClass::HeadLayout,
        bugs: &[],
        killed_by: &["kda.ranks", "kda.output", "kda.window"],
        apply: |p| p.kda.first_head = |_, _| 0,
    },
    Fault {
        name: "kda-state-sharded-as-the-cache",
        title: "a rank takes into its states only the rows that decode context parallelism gives it in the caches",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["kda.ranks", "kda.state"],
        apply: |p| p.kda.takes = |member, world, row| row % world == member,
    },
    Fault {
        name: "kda-bias-behind-the-factor",
        title: "the bias of a decay is added behind the factor exp(A) and not before it",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.core", "kda.state"],
        apply: |p| {
            p.kda.log_decay = |gate, a_log, a, bias| match gate {
                KdaGate::LowerBound => KdaGate::LOWER_BOUND * sigmoid(a_log.exp() * a + bias),
                KdaGate::Softplus => -a_log.exp() * softplus(a) - bias,
            }
        },
    },
    Fault {
        name: "kda-gate-without-its-bound",
        title: "decays are those of softplus, whichever gate the layer has",
        class: FaultClass::ConfigGate,
        bugs: &[],
        killed_by: &["kda.output", "kda.state"],
        apply: |p| p.kda.log_decay = |_, a_log, a, bias| log_decay(KdaGate::Softplus, a_log, a, bias),
    },
    Fault {
        name: "kda-decay-never-1",
        title: "a decay is held below 1, so that a state that should stay as it is fades",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.gates"],
        apply: |p| p.kda.log_decay = |gate, a_log, a, bias| log_decay(gate, a_log, a, bias).min(-1e-6),
    },
    Fault {
        name: "kda-share-in-16-bits",
        title: "the share of an update is rounded to 16 bits",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.core", "kda.state"],
        apply: |p| p.kda.share = |x| coarse(sigmoid(x)),
    },
    Fault {
        name: "kda-share-without-sigmoid",
        title: "the logit of an update's share is clamped to 0 and 1 in place of its sigmoid",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output", "kda.state"],
        apply: |p| p.kda.share = |x| x.clamp(0.0, 1.0),
    },
    Fault {
        name: "kda-decay-behind-the-update",
        title: "the state is updated first and decays then, the update included",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["kda.output", "kda.state"],
        apply: |p| p.kda.decays_first = false,
    },
    Fault {
        name: "kda-read-before-the-update",
        title: "a row reads the state before its own token is in it",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["kda.output", "kda.core"],
        apply: |p| p.kda.reads_first = true,
    },
    Fault {
        name: "kda-adds-the-value-whole",
        title: "a value is added to what the state has for its key, not only what is new of it",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output", "kda.state"],
        apply: |p| p.kda.news = |value, _| value,
    },
    Fault {
        name: "kda-state-in-16-bits",
        title: "states are stored in 16 bits between steps",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.state"],
        apply: |p| p.kda.stored = coarse,
    },
    Fault {
        name: "kda-state-transposed",
        title: "a state that was stored key by key is taken back value by value",
        class: FaultClass::LayoutIndex,
        bugs: &[],
        killed_by: &["kda.split", "kda.output", "kda.state", "kda.gates"],
        apply: |p| p.kda.place = |row, column, depth, _| column * depth + row,
    },
    Fault {
        name: "kda-chunk-forgets-decays-between-its-rows",
        title: "rows of a chunk meet each other without the decays that lie between them",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["kda.output", "kda.state", "kda.split"],
        apply: |p| p.kda.within = |_, _| 1.0,
    },
    Fault {
        name: "kda-chunk-reads-the-state-one-decay-early",
        title: "what was there before a chunk is decayed up to the row before the one that reads it",
        class: FaultClass::CausalBound,
        bugs: &[],
        killed_by: &["kda.output", "kda.state", "kda.split"],
        apply: |p| p.kda.entry = |sums, row| if row == 0 { 0.0 } else { sums[row - 1] },
    },
    Fault {
        name: "kda-chunk-counts-the-state-twice",
        title: "what was there before a chunk is counted twice in it",
        class: FaultClass::StaleMetadata,
        bugs: &["vllm-ascend#11508"],
        killed_by: &["kda.output", "kda.state", "kda.split"],
        apply: |p| p.kda.entry = |sums, row| sums[row] + std::f32::consts::LN_2,
    },
    Fault {
        name: "kda-gate-before-the-norm",
        title: "the output is gated before it is normalised",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output"],
        apply: |p| {
            p.kda.norm = |core, weight, gate, epsilon| {
                let gated: Vec<f32> = core.iter().zip(gate).map(|(x, gate)| x * sigmoid(*gate)).collect();
                normed(&gated, epsilon).iter().zip(weight).map(|(x, weight)| x * weight).collect()
            }
        },
    },
    Fault {
        name: "kda-output-gate-without-sigmoid",
        title: "the output is gated by the gate itself and not by its sigmoid",
        class: FaultClass::DtypeScale,
        bugs: &[],
        killed_by: &["kda.output"],
        apply: |p| {
            p.kda.norm = |core, weight, gate, epsilon| {
                let gates = weight.iter().zip(gate).map(|(weight, gate)| weight * gate);
                normed(core, epsilon).iter().zip(gates).map(|(x, open)| x * open).collect()
            }
        },
    },
];
