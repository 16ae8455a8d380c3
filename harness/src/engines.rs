//! Engines by the name that the command line gives them.

use std::time::Duration;

use shardcheck_cpu::{CpuEngine, Fault, fault, faults};
use shardcheck_engine::Engine;

use crate::boundary::boundary_fault;
use crate::guard::Guarded;
use crate::nearest::nearest;

/// An engine that can't be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EngineChoiceError {
    /// No engine of that name.
    #[error("unknown engine {name:?}; this program holds: cpu")]
    UnknownEngine {
        /// Name that was given.
        name: String,
    },
    /// No fault of that name.
    #[error("unknown fault {name:?}{}; `shardcheck mutants list` lists them", hint(suggestion.as_deref()))]
    UnknownFault {
        /// Name that was given.
        name: String,
        /// The known name that looks most like it.
        suggestion: Option<String>,
    },
    /// A fault that is put between the harness and any engine, not into the embedded one.
    #[error(
        "{name} is a fault at the boundary of an engine, not in the embedded engine: `shardcheck mutants run --boundary \
         --fault {name}` tries it"
    )]
    FaultAtTheBoundary {
        /// Its name.
        name: &'static str,
    },
    /// Not a time that can be waited.
    #[error("--timeout-s {timeout_s} is not a number of seconds above zero")]
    Timeout {
        /// Seconds that were given.
        timeout_s: f64,
    },
    /// A contract that would pass anything.
    #[error("the engine's profile is refused: {0}")]
    Profile(String),
}

fn hint(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

/// How many times longer a step may take than its ranks may wait for each other. Ranks that wait are told by name by the
/// embedded engine itself; the guard before it gives up what never comes back at all, and computing is not waiting.
const STEP_PER_WAIT: u32 = 4;

/// Opens an engine behind a guard, with a fault where one is asked for. `timeout_s` is how long ranks may wait for each
/// other; a step may take four times that.
///
/// # Errors
/// [`EngineChoiceError`]; all of them are usage errors.
pub fn open(
    name: &str,
    fault_name: Option<&str>,
    timeout_s: f64,
) -> Result<Box<dyn Engine>, EngineChoiceError> {
    if name != "cpu" {
        return Err(EngineChoiceError::UnknownEngine { name: name.to_owned() });
    }
    let engine = match fault_name {
        None => shardcheck_cpu::engine(),
        Some(name) => CpuEngine::with_fault(find_fault(name)?),
    };
    let wait = Duration::try_from_secs_f64(timeout_s).ok().filter(|wait| !wait.is_zero());
    let limit = wait.and_then(|wait| wait.checked_mul(STEP_PER_WAIT));
    let (Some(wait), Some(limit)) = (wait, limit) else {
        return Err(EngineChoiceError::Timeout { timeout_s });
    };
    let engine: Box<dyn Engine> = Box::new(engine.with_timeout(wait));
    engine.profile().check().map_err(EngineChoiceError::Profile)?;
    Ok(Box::new(Guarded::new(engine, limit)))
}

/// The fault of that name.
///
/// # Errors
/// [`EngineChoiceError::UnknownFault`], [`EngineChoiceError::FaultAtTheBoundary`].
pub fn find_fault(name: &str) -> Result<&'static Fault, EngineChoiceError> {
    fault(name).ok_or_else(|| match boundary_fault(name) {
        Some(fault) => EngineChoiceError::FaultAtTheBoundary { name: fault.name },
        None => EngineChoiceError::UnknownFault {
            name: name.to_owned(),
            suggestion: nearest(name, faults().iter().map(|fault| fault.name)).map(str::to_owned),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boundary::boundary_faults;

    #[test]
    fn a_fault_at_the_boundary_is_never_taken_for_a_slip_in_the_name_of_another() {
        // a name that both have means the one in the engine
        for known in boundary_faults().filter(|known| fault(known.name).is_none()) {
            let error = find_fault(known.name).unwrap_err();
            assert_eq!(error, EngineChoiceError::FaultAtTheBoundary { name: known.name });
            let command = format!("mutants run --boundary --fault {}", known.name);
            assert!(error.to_string().contains(&command) && !error.to_string().contains("did you mean"));
        }
    }
}
