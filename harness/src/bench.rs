//! Measurements of the checks themselves: do the bounds hold, what do they see, how fast is the oracle.
//!
//! None of it belongs to a gate: [`bounds`] and [`sensitivity`] run a simulated engine ([`simulation`]) by the million, and
//! [`oracle`] wants a quiet machine.

pub mod bounds;
pub mod inputs;
pub mod oracle;
mod peak;
pub mod progress;
pub mod protocol;
pub mod scheme;
pub mod sensitivity;
pub mod simulation;
mod sums;
mod torch;

/// Whether a value keeps a limit; NaN keeps none.
fn within(value: f64, limit: f64) -> bool {
    value <= limit
}
