//! The embedded engine: healthy, or with one fault.

use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Profile, RuleSetName, Session, Settings, Validation,
};

use crate::faults::Fault;
use crate::policies::Policies;
use crate::profile::profile;
use crate::rules::validate;
use crate::session::CpuSession;

/// Longest time in which all ranks wait for each other, unless set.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Most cache bytes that a session allocates over all ranks: 4 GiB.
pub const MAX_CACHE_BYTES: usize = 4 << 30;

/// Most ranks of a session: each is a thread.
pub const MAX_RANKS: usize = 256;

/// An engine whose ranks are threads of this process, with real exchanges between them.
pub struct CpuEngine {
    policies: Policies,
    profile: Profile,
    timeout: Duration,
}

/// The healthy engine: the published algorithms, and no fault.
pub fn engine() -> CpuEngine {
    CpuEngine { policies: Policies::HEALTHY, profile: profile(), timeout: DEFAULT_TIMEOUT }
}

impl CpuEngine {
    /// The engine with one policy replaced. Its profile is that of the healthy engine: a faulty engine does not know.
    pub fn with_fault(fault: &'static Fault) -> Self {
        let mut faulty = engine();
        (fault.apply)(&mut faulty.policies);
        faulty
    }

    /// Sets the longest time in which all ranks wait for each other; a rank that computes is waited for.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl Engine for CpuEngine {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        let checked = (self.policies.gates.rules)(rules);
        Ok(match validate(rules, &checked, settings) {
            Ok(validation) => Answer::Done(validation),
            Err(unknown) => Answer::Unsupported(unknown),
        })
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        if let Err(reason) = (self.policies.session.admit)(configuration) {
            return Ok(Answer::Unsupported(reason));
        }
        Ok(match limits(configuration) {
            Err(reason) => Answer::Unsupported(reason),
            Ok(()) => {
                Answer::Done(Box::new(CpuSession::new(configuration.clone(), self.policies, self.timeout)))
            }
        })
    }
}

/// What this engine, unlike others, cannot hold.
fn limits(configuration: &Configuration) -> Result<(), String> {
    if let Some(second) = &configuration.second_group {
        limits(second).map_err(|reason| format!("second KV group: {reason}"))?;
    }
    if configuration.tp > MAX_RANKS {
        return Err(format!(
            "tp {} is more than the {MAX_RANKS} threads that this engine runs",
            configuration.tp
        ));
    }
    let width = configuration.attention.qk_dim() + configuration.attention.value_dim();
    let elements = [configuration.tp, configuration.blocks, configuration.block_size, width]
        .into_iter()
        .chain([configuration.attention.kv_heads(), configuration.kv_dtype.size_bytes()])
        .try_fold(1usize, usize::checked_mul);
    match elements {
        Some(bytes) if bytes <= MAX_CACHE_BYTES => Ok(()),
        _ => Err(format!("the caches of all ranks take more than {MAX_CACHE_BYTES} bytes: use fewer blocks")),
    }
}
