//! The steps of a sequence as they stand in a case id.
//!
//! ```text
//! p0+12,1+5.c64   prefill: 12 new tokens of request 0, 5 of request 1, gathered in chunks of 64 tokens
//! d0,1,2.pad3     decode of three requests, padded by three rows
//! v0+4,1+3        verify; r0-2: the last two tokens of request 0 are rejected
//! b0+4            draft block
//! h1=0x2          request 1 hits two blocks of request 0's prefix
//! f0, e0          request 0 is freed; evicted
//! i0+9,1+4.w3.s2.b4  nine tokens of request 0 and four of request 1 come from a session of W = 3, S = 2, B = 4
//! ```

use std::fmt;

use shardcheck_engine::CacheLayout;

use super::{NewTokens, RunKind, Step};

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&spell_step(self))
    }
}

fn letter(kind: RunKind) -> char {
    match kind {
        RunKind::Prefill => 'p',
        RunKind::Decode => 'd',
        RunKind::Verify => 'v',
        RunKind::Draft => 'b',
    }
}

/// The steps, joined by `_`.
pub(crate) fn spell_steps(steps: &[Step]) -> String {
    steps.iter().map(Step::to_string).collect::<Vec<_>>().join("_")
}

fn spell_step(step: &Step) -> String {
    match step {
        Step::Run { kind, batch, padded_rows, chunk_budget_tokens } => {
            let entries: Vec<String> = batch
                .iter()
                .map(|entry| match (kind, entry.tokens) {
                    (RunKind::Decode, 1) => entry.request.to_string(),
                    (_, tokens) => format!("{}+{tokens}", entry.request),
                })
                .collect();
            let mut text = format!("{}{}", letter(*kind), entries.join(","));
            if *padded_rows > 0 {
                text += &format!(".pad{padded_rows}");
            }
            if *chunk_budget_tokens > 0 {
                text += &format!(".c{chunk_budget_tokens}");
            }
            text
        }
        Step::Reject { request, tokens } => format!("r{request}-{tokens}"),
        Step::Hit { request, source, blocks } => format!("h{request}={source}x{blocks}"),
        Step::Import { batch, source } => {
            let entries: Vec<String> =
                batch.iter().map(|entry| format!("{}+{}", entry.request, entry.tokens)).collect();
            let (w, s, b) = (source.dcp, source.interleave, source.block_size);
            format!("i{}.w{w}.s{s}.b{b}", entries.join(","))
        }
        Step::Free { request } => format!("f{request}"),
        Step::Evict { request } => format!("e{request}"),
    }
}

/// Reads steps that [`spell_steps`] wrote.
///
/// # Errors
/// The step that is none.
pub(crate) fn read_steps(text: &str) -> Result<Vec<Step>, String> {
    let none = |step: &str| {
        format!(
            "{step:?} is no step, such as p0+12.c64, d0,1.pad2, v0+4, b0+4, r0-2, h1=0x2, f0 or e0 (numbers up to {})",
            crate::MAX_TOKENS
        )
    };
    text.split('_').map(|step| read_step(step).ok_or_else(|| none(step))).collect()
}

fn read_step(text: &str) -> Option<Step> {
    let first = text.chars().next()?;
    let rest = &text[first.len_utf8()..];
    if let Some(kind) = RunKind::ALL.into_iter().find(|kind| letter(*kind) == first) {
        return read_run(kind, rest);
    }
    Some(match first {
        'r' => {
            let (request, tokens) = rest.split_once('-')?;
            Step::Reject { request: number(request)?, tokens: number(tokens)? }
        }
        'h' => {
            let (request, from) = rest.split_once('=')?;
            let (source, blocks) = from.split_once('x')?;
            Step::Hit { request: number(request)?, source: number(source)?, blocks: number(blocks)? }
        }
        'i' => return read_import(rest),
        'f' => Step::Free { request: number(rest)? },
        'e' => Step::Evict { request: number(rest)? },
        _ => return None,
    })
}

fn read_run(kind: RunKind, text: &str) -> Option<Step> {
    let mut parts = text.split('.');
    let mut batch = Vec::new();
    for entry in parts.next()?.split(',') {
        batch.push(match entry.split_once('+') {
            Some((request, tokens)) => NewTokens { request: number(request)?, tokens: number(tokens)? },
            None if kind == RunKind::Decode => NewTokens { request: number(entry)?, tokens: 1 },
            None => return None,
        });
    }
    let (mut padded_rows, mut chunk_budget_tokens) = (0, 0);
    for part in parts {
        if let Some(rows) = part.strip_prefix("pad").filter(|_| padded_rows == 0) {
            padded_rows = number(rows)?;
        } else {
            chunk_budget_tokens = number(part.strip_prefix('c').filter(|_| chunk_budget_tokens == 0)?)?;
        }
    }
    Some(Step::Run { kind, batch, padded_rows, chunk_budget_tokens })
}

fn read_import(text: &str) -> Option<Step> {
    let (batch, source) = text.split_once(".w")?;
    let (dcp, source) = source.split_once(".s")?;
    let (interleave, block_size) = source.split_once(".b")?;
    let entry = |entry: &str| {
        let (request, tokens) = entry.split_once('+')?;
        Some(NewTokens { request: number(request)?, tokens: number(tokens)? })
    };
    Some(Step::Import {
        batch: batch.split(',').map(entry).collect::<Option<_>>()?,
        source: CacheLayout {
            dcp: number(dcp)?,
            interleave: number(interleave)?,
            block_size: number(block_size)?,
        },
    })
}

/// A whole number without sign, in the one way in which it is written.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|value: &usize| value.to_string() == text && *value <= crate::MAX_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_read_back_as_they_are_spelled() {
        let text = "p0+12,1+5.c64_d0,1,2.pad3_v0+4,1+0_r0-2_b1+4.pad1_h3=0x2_f0_e1_d1+0,2_i4+9,5+1.w3.s2.b4";
        assert_eq!(spell_steps(&read_steps(text).unwrap()), text);
    }

    #[test]
    fn what_is_no_step_is_named() {
        for text in [
            "",
            "x0",
            "v0",
            "d0,",
            "p0+1.c",
            "r0",
            "h1=0",
            "f",
            "d00",
            "v0+4.pad1.pad2",
            "d0__f0",
            "é0",
            "i0.w1.s1.b1",
            "i0+1.w1.s1",
        ] {
            assert!(read_steps(text).unwrap_err().contains("is no step"), "{text}");
        }
    }
}
