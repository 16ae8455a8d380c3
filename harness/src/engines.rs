//! Engines by the name that the command line gives them.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use shardcheck_cpu::{CpuEngine, Fault, fault, faults};
use shardcheck_cuda::{CudaEngine, Devices, Graphs};
use shardcheck_engine::Engine;
use shardcheck_process::{EngineLog, ProcessEngine, ProcessOptions, StartError};

use crate::boundary::boundary_fault;
use crate::guard::Guarded;
use crate::nearest::nearest;

/// How Python begins to say that the adapters' package is not there.
const SDK_IS_MISSING: &str = "ModuleNotFoundError: No module named 'shardcheck'";
/// Environment variable with the Python interpreter of adapters.
pub const PYTHON_VARIABLE: &str = "SHARDCHECK_PYTHON";

/// Options that name an engine.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Engine under test: `cpu` (embedded), `cuda` (native, docs/cuda.md), `cuda:graphs` (its steps captured and replayed), `hip`, `exec:COMMAND` (an adapter, docs/protocol.md), `python:MODULE:CLASS` (an adapter of the Python SDK),
    /// `vllm@VERSION`, `vllm-ascend@VERSION` or `sglang@VERSION` (a release that `shardcheck engines fetch vllm==VERSION` brought); cpu when not given
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<String>,

    /// Devices of the engine `cuda`, joined by collectives with one rank or more on each: `all`, or their numbers, such as `0,1`; one
    /// device that plays all ranks by itself when not given
    #[arg(long, value_name = "DEVICES")]
    pub devices: Option<String>,

    /// File of the library with the collectives, such as `libnccl.so.2`; looked for by that name when not given
    #[arg(long, value_name = "FILE")]
    pub collectives: Option<PathBuf>,

    /// Seconds that an engine behind a command may take to say hello
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS")]
    pub start_timeout_s: f64,
}

impl EngineArgs {
    /// Name of the engine.
    pub fn name(&self) -> &str {
        self.engine.as_deref().unwrap_or(EMBEDDED)
    }

    /// Whether the embedded engine is asked for.
    pub fn is_embedded(&self) -> bool {
        self.name() == EMBEDDED
    }

    /// Whether the engine lives in this process and answers several sessions at once.
    pub fn is_in_process(&self) -> bool {
        self.is_embedded() || self.is_cuda()
    }

    /// Whether the native engine on CUDA is asked for.
    pub fn is_cuda(&self) -> bool {
        matches!(choice(self.name()), Ok(Choice::Cuda(_)))
    }

    /// Refuses a name that stands for nothing.
    ///
    /// # Errors
    /// [`EngineChoiceError::UnknownEngine`].
    pub fn check(&self) -> Result<(), EngineChoiceError> {
        choice(self.name())?;
        self.joined().map(drop)
    }

    /// The engine of that name, and nothing else said of it.
    pub fn named(engine: Option<String>) -> Self {
        Self { engine, devices: None, collectives: None, start_timeout_s: 1.0 }
    }

    /// The devices that are to be joined.
    fn joined(&self) -> Result<Option<JoinedDevices>, EngineChoiceError> {
        let Some(text) = &self.devices else { return Ok(None) };
        let refused = |why| EngineChoiceError::Devices { text: text.clone(), why };
        if choice(self.name())? != Choice::Cuda(Graphs::Off) {
            return Err(refused("they are those of the engine cuda, whose steps are not captured"));
        }
        if text == "all" {
            return Ok(Some(JoinedDevices::All));
        }
        let numbers = text.split(',').map(|number| number.trim().parse::<usize>().ok());
        let numbers: Option<Vec<usize>> = numbers.collect();
        let numbers = numbers.ok_or_else(|| refused("use all, or numbers with commas between them"))?;
        let repeated = (1..numbers.len()).any(|at| numbers[..at].contains(&numbers[at]));
        if repeated { Err(refused("each is named once")) } else { Ok(Some(JoinedDevices::Numbers(numbers))) }
    }

    /// Whether the engine can be opened with that fault.
    pub fn has_fault(&self, name: &str) -> bool {
        match choice(self.name()) {
            Ok(Choice::Embedded) => fault(name).is_some(),
            Ok(Choice::Cuda(graphs)) => shardcheck_cuda::has_fault(name, graphs, self.devices.is_some()),
            _ => false,
        }
    }
}

/// Name of the embedded engine.
pub const EMBEDDED: &str = "cpu";
/// Name of the native engine on CUDA, its kernels launched one by one.
pub const CUDA: &str = "cuda";
/// The same, its steps captured once and replayed.
pub const CUDA_GRAPHS: &str = "cuda:graphs";
/// Name of the native engine on HIP.
pub const HIP: &str = "hip";

/// Published engines whose releases the Python package has an adapter for, one a module of that name, with underscores for its dashes.
const PUBLISHED: [&str; 3] = ["vllm", "vllm-ascend", "sglang"];

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    Embedded,
    Cuda(Graphs),
    Hip,
    Command(String),
}

/// Devices that are to be joined.
#[derive(Debug, Clone, PartialEq, Eq)]
enum JoinedDevices {
    All,
    Numbers(Vec<usize>),
}

/// An engine that was opened by name.
pub struct OpenEngine {
    engine: Box<dyn Engine>,
    /// What it prints, where it is a process.
    pub log: Option<EngineLog>,
}

impl OpenEngine {
    /// The engine alone.
    pub fn into_engine(self) -> Box<dyn Engine> {
        self.engine
    }
}

impl Deref for OpenEngine {
    type Target = dyn Engine;

    fn deref(&self) -> &Self::Target {
        self.engine.as_ref()
    }
}

/// An engine that can't be had.
#[derive(Debug, thiserror::Error)]
pub enum EngineChoiceError {
    /// No engine of that name.
    #[error(
        "unknown engine {name:?}: use cpu, cuda, cuda:graphs, hip, exec:COMMAND, python:MODULE:CLASS, vllm@VERSION, vllm-ascend@VERSION or sglang@VERSION{}",
        hint(suggestion.as_deref())
    )]
    UnknownEngine {
        /// Name that was given.
        name: String,
        /// What was probably meant.
        suggestion: Option<String>,
    },
    /// No fault of that name.
    #[error("unknown fault {name:?}{}; `shardcheck mutants list` lists them", hint(suggestion.as_deref()))]
    UnknownFault {
        /// Name that was given.
        name: String,
        /// The known name that looks most like it.
        suggestion: Option<String>,
    },
    /// A fault that the native engine has not got.
    #[error(
        "{name} is a fault of a part that {engine} has not got; `shardcheck mutants list --engine {engine}` lists its own"
    )]
    NotInEngine {
        /// Its name.
        name: String,
        /// Engine that was given.
        engine: String,
    },
    /// An engine whose device is not there.
    #[error("{engine}: {reason}")]
    NoDevice {
        /// Engine that was given.
        engine: String,
        /// What is missing.
        reason: String,
    },
    /// Devices that can't be.
    #[error("--devices {text}: {why}")]
    Devices {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A fault for an engine that has none.
    #[error(
        "faults are parts of the embedded engine, and {engine} is another: `shardcheck mutants run --boundary --engine …` tampers with what passes between the harness and any engine"
    )]
    NoFaults {
        /// Engine that was given.
        engine: String,
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
    #[error("{option} {seconds} is not a number of seconds above zero")]
    Timeout {
        /// Option that it was given to.
        option: &'static str,
        /// Seconds that were given.
        seconds: f64,
    },
    /// A contract that would pass anything.
    #[error("the engine's profile is refused: {0}")]
    Profile(String),
    /// A command that is no engine.
    #[error("{engine}: {error}{}", advice(error))]
    Start {
        /// Engine that was given.
        engine: String,
        /// What is wrong.
        error: StartError,
    },
}

fn hint(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

/// How many times longer a step may take than its ranks may wait for each other. Ranks that wait are told by name by the
/// embedded engine itself; the guard before it gives up what never comes back at all, and computing is not waiting.
const STEP_PER_WAIT: u32 = 4;

/// Opens an engine, with a fault where one is asked for. `timeout_s` is how long ranks may wait for each
/// other; a step may take four times that.
///
/// # Errors
/// [`EngineChoiceError`].
pub fn open(
    args: &EngineArgs,
    fault_name: Option<&str>,
    timeout_s: f64,
) -> Result<OpenEngine, EngineChoiceError> {
    let wait = seconds("--timeout-s", timeout_s)?;
    let limit = wait
        .checked_mul(STEP_PER_WAIT)
        .ok_or(EngineChoiceError::Timeout { option: "--timeout-s", seconds: timeout_s })?;
    let joined = args.joined()?;
    match (choice(args.name())?, fault_name) {
        (Choice::Command(_), Some(_)) => Err(EngineChoiceError::NoFaults { engine: args.name().to_owned() }),
        (Choice::Command(command), None) => {
            let start_timeout = seconds("--start-timeout-s", args.start_timeout_s)?;
            let options = ProcessOptions { command, start_timeout, question_timeout: limit };
            let engine = ProcessEngine::start(options)
                .map_err(|error| EngineChoiceError::Start { engine: args.name().to_owned(), error })?;
            let log = Some(engine.log());
            Ok(OpenEngine { engine: Box::new(engine), log })
        }
        (Choice::Embedded, fault_name) => {
            let engine = match fault_name {
                None => shardcheck_cpu::engine(),
                Some(name) => CpuEngine::with_fault(find_fault(name)?),
            };
            guarded(Box::new(engine.with_timeout(wait)), limit)
        }
        (Choice::Cuda(graphs), fault_name) => {
            let fault = fault_name.map(find_fault).transpose()?.map(|fault| fault.name);
            if let Some(name) = fault.filter(|name| !args.has_fault(name)) {
                let (name, engine) = (name.to_owned(), args.name().to_owned());
                return Err(EngineChoiceError::NotInEngine { name, engine });
            }
            let devices = match &joined {
                None => Devices::One(0),
                Some(JoinedDevices::All) => Devices::All,
                Some(JoinedDevices::Numbers(numbers)) => Devices::Joined(numbers),
            };
            let collectives = args.collectives.as_deref();
            let options =
                shardcheck_cuda::Options { devices, collectives, wait, graphs, fault, ..Default::default() };
            let engine = CudaEngine::open(options).map_err(|error| no_device(args, error))?;
            guarded(Box::new(engine), limit)
        }
        (Choice::Hip, _) => Err(match shardcheck_hip::probe() {
            Err(error) => no_device(args, error),
            Ok(found) => no_device(
                args,
                format!("no session for {found}: the host side of HIP loads, compiles and launches so far"),
            ),
        }),
    }
}

fn guarded(engine: Box<dyn Engine>, limit: Duration) -> Result<OpenEngine, EngineChoiceError> {
    engine.profile().check().map_err(EngineChoiceError::Profile)?;
    Ok(OpenEngine { engine: Box::new(Guarded::new(engine, limit)), log: None })
}

fn no_device(args: &EngineArgs, reason: impl std::fmt::Display) -> EngineChoiceError {
    EngineChoiceError::NoDevice { engine: args.name().to_owned(), reason: reason.to_string() }
}

/// What the arithmetic of the native engine's card is seen to be.
///
/// # Errors
/// [`EngineChoiceError::NoDevice`] without a device, or when it is lost on the way.
pub fn card_readings(args: &EngineArgs) -> Result<Vec<shardcheck_cuda::CardReading>, EngineChoiceError> {
    let engine =
        CudaEngine::open(shardcheck_cuda::Options::default()).map_err(|error| no_device(args, error))?;
    shardcheck_cuda::readings(engine.device()).map_err(|error| no_device(args, error))
}

/// What to do about a start that failed for a reason that is known.
fn advice(error: &StartError) -> &'static str {
    match error {
        StartError::Ended { said, .. } if said.contains(SDK_IS_MISSING) => {
            "\nits Python has no package of this name: `pip install ./runners/python`, or name an interpreter that has it in SHARDCHECK_PYTHON"
        }
        _ => "",
    }
}

/// The Python interpreter of adapters.
pub fn python() -> String {
    std::env::var(PYTHON_VARIABLE).unwrap_or_else(|_| "python3".to_owned())
}

/// What an engine's name stands for.
fn choice(name: &str) -> Result<Choice, EngineChoiceError> {
    let python = python();
    let adapter = |spec: &str| format!("{python} -m shardcheck.adapter {spec}");
    match name {
        EMBEDDED => return Ok(Choice::Embedded),
        CUDA => return Ok(Choice::Cuda(Graphs::Off)),
        CUDA_GRAPHS => return Ok(Choice::Cuda(Graphs::On)),
        HIP => return Ok(Choice::Hip),
        _ => {}
    }
    if let Some(command) = name.strip_prefix("exec:").filter(|command| !command.trim().is_empty()) {
        return Ok(Choice::Command(command.to_owned()));
    }
    if let Some(spec) = name.strip_prefix("python:").filter(|spec| !spec.trim().is_empty()) {
        return Ok(Choice::Command(adapter(spec)));
    }
    let (engine, version) = name.split_once('@').unwrap_or((name, ""));
    let is_version = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '+'));
    if PUBLISHED.contains(&engine) && !version.is_empty() && is_version(version) {
        let module = engine.replace('-', "_");
        let spec = format!("shardcheck.adapters.{module}:Engine --release {version}");
        return Ok(Choice::Command(adapter(&spec)));
    }
    let fixed = [EMBEDDED, CUDA, HIP, "exec:COMMAND", "python:MODULE:CLASS"].map(str::to_owned);
    let published = PUBLISHED.map(|name| format!("{name}@VERSION"));
    let known: Vec<String> = fixed.into_iter().chain(published).collect();
    let suggestion = nearest(engine, known.iter().map(String::as_str));
    Err(EngineChoiceError::UnknownEngine { name: name.to_owned(), suggestion: suggestion.map(str::to_owned) })
}

fn seconds(option: &'static str, seconds: f64) -> Result<Duration, EngineChoiceError> {
    let wait = Duration::try_from_secs_f64(seconds).ok().filter(|wait| !wait.is_zero());
    wait.ok_or(EngineChoiceError::Timeout { option, seconds })
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
    fn names_stand_for_commands() {
        assert_eq!(choice("cpu").unwrap(), Choice::Embedded);
        assert_eq!(choice("cuda:graphs").unwrap(), Choice::Cuda(Graphs::On));
        assert_eq!(choice("exec:torchrun x").unwrap(), Choice::Command("torchrun x".to_owned()));
        let Choice::Command(vllm) = choice("vllm@0.33.0").unwrap() else { panic!("no command") };
        assert!(vllm.ends_with("-m shardcheck.adapter shardcheck.adapters.vllm:Engine --release 0.33.0"));
        let Choice::Command(sglang) = choice("sglang@0.5.23").unwrap() else { panic!("no command") };
        assert!(sglang.ends_with("-m shardcheck.adapter shardcheck.adapters.sglang:Engine --release 0.5.23"));
        let Choice::Command(ascend) = choice("vllm-ascend@0.26.0rc1").unwrap() else { panic!("no command") };
        assert!(ascend.ends_with("shardcheck.adapters.vllm_ascend:Engine --release 0.26.0rc1"));
    }

    #[test]
    fn a_name_that_stands_for_nothing_is_refused_with_what_would_do() {
        for name in
            ["cppu", "exec:", "python:", "vllm", "vllm@", "vllm@0.33.0;rm", "sglang@", "trtllm@1.0", "cuda:2"]
        {
            let error = choice(name).unwrap_err().to_string();
            assert!(error.contains("exec:COMMAND"), "{name}: {error}");
        }
    }

    #[test]
    fn devices_are_numbers_that_are_named_once_and_those_of_the_native_engine() {
        let joined = |engine: &str, devices: &str| {
            let args = EngineArgs::named(Some(engine.to_owned()));
            EngineArgs { devices: Some(devices.to_owned()), ..args }.joined()
        };
        assert_eq!(joined("cuda", "all").unwrap(), Some(JoinedDevices::All));
        assert_eq!(joined("cuda", "0, 2").unwrap(), Some(JoinedDevices::Numbers(vec![0, 2])));
        for (engine, devices) in
            [("cuda", "0,0"), ("cuda", ""), ("cuda", "0,x"), ("cuda:graphs", "0"), ("cpu", "0")]
        {
            let error = joined(engine, devices).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--devices {devices}: ")), "{error}");
        }
    }

    #[test]
    fn a_fault_is_refused_for_an_engine_behind_a_command() {
        let args = EngineArgs::named(Some("exec:true".to_owned()));
        let error = open(&args, Some("ranks-averaged"), 1.0).err().unwrap().to_string();
        assert!(error.contains("--boundary"), "{error}");
    }

    #[test]
    fn the_native_engine_has_the_faults_of_its_kernels_and_with_graphs_those_of_replays() {
        let has = |engine: &str, name: &str| EngineArgs::named(Some(engine.to_owned())).has_fault(name);
        assert!(has("cuda", "ranks-averaged") && has("cuda:graphs", "ranks-averaged"));
        assert!(
            !has("cuda", "lengths-captured-by-bucket") && has("cuda:graphs", "lengths-captured-by-bucket")
        );
        assert!(!has("cuda", "drafts-refused-everywhere") && has("cpu", "drafts-refused-everywhere"));
        // every macro of the kernels and every fault of a replay is a fault that is known
        let known = |name: &str| faults().iter().any(|fault| fault.name == name);
        let in_kernels = shardcheck_kernels::fault_macros();
        assert!(in_kernels.len() > 90, "{}", in_kernels.len());
        for name in in_kernels {
            assert!(
                faults().iter().any(|fault| shardcheck_kernels::macro_name(fault.name) == name),
                "{name}"
            );
        }
        assert!(known("mask-absent-since-capture"));
        let devices = Some("all".to_owned());
        let joined = EngineArgs { devices, ..EngineArgs::named(Some("cuda".to_owned())) };
        for name in [
            "one-rank-skips-the-query-gather",
            "one-rank-skips-the-lse-gather",
            "rank-without-context-skips-the-gather",
            "one-rank-keeps-out-of-the-gather-of-a-larger-step",
        ] {
            assert!(joined.has_fault(name) && known(name) && !has("cuda", name), "{name}");
        }
    }

    #[test]
    fn a_fault_at_the_boundary_is_never_taken_for_a_slip_in_the_name_of_another() {
        // a name that both have means the one in the engine
        for known in boundary_faults().filter(|known| fault(known.name).is_none()) {
            let error = find_fault(known.name).unwrap_err();
            assert!(matches!(error, EngineChoiceError::FaultAtTheBoundary { name } if name == known.name));
            let command = format!("mutants run --boundary --fault {}", known.name);
            assert!(error.to_string().contains(&command) && !error.to_string().contains("did you mean"));
        }
    }
}
