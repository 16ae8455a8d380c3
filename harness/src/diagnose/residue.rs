//! What a whole output leaves when every element of it lies within its width: a matched filter for the effect of a fault.
//!
//! With r = seen − healthy and s = mutant − healthy, the amplitude c = ⟨r, s⟩ / ⟨s, s⟩ is 1 for the right fault, up to the noise
//! of two roundings. This is the least-squares estimate of the amplitude of a known signal (the matched filter).

use shardcheck_engine::Engine;

use super::replay::play;
use crate::recording::{Answered, SessionRecord};

/// Sessions that are looked at.
const MOST_SESSIONS: usize = 8;
/// Standard deviations of its own noise that an amplitude must reach.
const LEAST_SCORE: f64 = 5.0;

/// Outputs of the healthy engine, to take differences from.
pub(crate) struct Residual {
    healthy: Vec<f64>,
}

impl Residual {
    /// The healthy engine's outputs; `None` when nothing that was seen differs from them.
    pub fn of(sessions: &[SessionRecord], healthy: &dyn Engine) -> Option<Self> {
        let seen = recorded(sessions);
        let healthy = answered(sessions, healthy)?;
        let comparable = seen.len() == healthy.len() && !seen.is_empty();
        let differs = || seen.iter().zip(&healthy).any(|(a, b)| a != b && !(a.is_nan() && b.is_nan()));
        (comparable && differs()).then_some(Self { healthy })
    }

    /// Mean square of what a mutant leaves unexplained; `None` when its effect is not what was seen.
    pub fn left_by(&self, sessions: &[SessionRecord], mutant: &dyn Engine) -> Option<f64> {
        let seen = recorded(sessions);
        let mutant = answered(sessions, mutant)?;
        if mutant.len() != self.healthy.len() {
            return None;
        }
        let (mut rs, mut ss, mut left, mut count) = (0.0, 0.0, 0.0, 0usize);
        for ((seen, mutant), healthy) in seen.iter().zip(&mutant).zip(&self.healthy) {
            let (r, s) = (seen - healthy, mutant - healthy);
            if r.is_finite() && s.is_finite() {
                rs += r * s;
                ss += s * s;
                left += (r - s).powi(2);
                count += 1;
            }
        }
        if ss == 0.0 || count == 0 {
            return None;
        }
        let amplitude = rs / ss;
        let noise = (left / count as f64).sqrt();
        let score = amplitude * ss.sqrt() / noise.max(f64::MIN_POSITIVE);
        ((0.5..=2.0).contains(&amplitude) && score >= LEAST_SCORE).then_some(left / count as f64)
    }
}

fn recorded(sessions: &[SessionRecord]) -> Vec<f64> {
    let mut values = Vec::new();
    for session in sessions.iter().take(MOST_SESSIONS) {
        for step in &session.steps {
            if let Answered::Done(reply) = &step.answer
                && let Some(out) = reply.outputs.find("out")
            {
                values.extend(out.to_f64());
            }
        }
    }
    values
}

fn answered(sessions: &[SessionRecord], engine: &dyn Engine) -> Option<Vec<f64>> {
    let mut values = Vec::new();
    for session in sessions.iter().take(MOST_SESSIONS) {
        let played = play(engine, session);
        for (step, answer) in session.steps.iter().zip(&played.steps) {
            let Answered::Done(seen) = &step.answer else { continue };
            if seen.outputs.find("out").is_some() {
                let Answered::Done(reply) = &answer.0 else { return None };
                values.extend(reply.outputs.find("out")?.to_f64());
            }
        }
    }
    Some(values)
}
