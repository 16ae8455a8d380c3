//! What the argument of `replay` and `shrink` names: cases, and the run that they come from.

use std::path::Path;

use shardcheck_cases::{Case, Family};

use crate::cli::CommandError;
use crate::commands::read_case;
use crate::engines::{self, EngineArgs, OpenEngine};
use crate::event::RunHeader;
use crate::nearest::nearest;
use crate::properties::{self, Property};
use crate::run_directory::{read_events, read_header, resolve};
use crate::select::SelectError;
use crate::store::CASE_FILE;

/// Cases to be judged again, and how they were judged.
#[derive(Debug)]
pub(super) struct Named {
    /// At least one.
    pub cases: Vec<Case>,
    /// The fault that was injected into the run that they failed in.
    pub fault: Option<String>,
    /// The engine of that run, where it is not the embedded one.
    pub engine: Option<String>,
}

impl Named {
    /// The one case of an id, a file, or the folder of a stored case; whatever run it lies in is known with it.
    ///
    /// # Errors
    /// Usage: `what` is none of them.
    pub fn one(what: &str) -> Result<Self, CommandError> {
        if what.is_empty() {
            return Err(CommandError::Usage("the name of a case or a run is empty".to_owned()));
        }
        let path = Path::new(what);
        let in_folder = path.join(CASE_FILE);
        let file = if in_folder.is_file() { in_folder } else { path.to_owned() };
        if file.is_file() {
            // a run's folder holds a folder of cases, that one a folder for each case
            let whole = file.canonicalize().unwrap_or_else(|_| file.clone());
            let header = whole.ancestors().nth(3).and_then(|run| read_header(run).ok());
            return Ok(Self::of_run(vec![read_case(&file)?], header));
        }
        if path.exists() {
            return Err(CommandError::Usage(format!(
                "{what:?} is no case: it is no file, and holds no {CASE_FILE}"
            )));
        }
        match what.parse() {
            Ok(case) => Ok(Self::of_run(vec![case], None)),
            // what begins with a family is meant as an id
            Err(error) if begins_with_a_family(what) => Err(CommandError::usage(error)),
            Err(error) => Err(CommandError::Usage(format!(
                "there is no file or folder of a case named {what:?}, and it is no case id: {error}"
            ))),
        }
    }

    /// As [`Named::one`], or the failed cases of a run: `latest`, a path, or an id below `runs`.
    ///
    /// # Errors
    /// As there; nothing selected when no case of the run failed.
    pub fn any(what: &str, runs: &Path) -> Result<Self, CommandError> {
        let none = match Self::one(what) {
            // a folder is a run or nothing, whatever else its name looks like
            Err(error) if Path::new(what).is_file() => return Err(error),
            Err(error) => error,
            named => return named,
        };
        let Ok(run) = resolve(runs, what) else { return Err(none) };
        let record = read_events(&run).map_err(CommandError::usage)?;
        if record.failed.is_empty() {
            return Err(CommandError::NothingSelected(format!("no case of {} failed", run.display())));
        }
        Ok(Self::of_run(record.failed.into_values().collect(), Some(record.header)))
    }

    fn of_run(cases: Vec<Case>, header: Option<RunHeader>) -> Self {
        let (fault, engine) = header.map_or((None, None), |header| (header.fault, Some(header.engine)));
        Self { cases, fault, engine: engine.filter(|engine| engine != engines::EMBEDDED) }
    }

    /// The engine and the fault to judge with: those that are asked for, else those of the run, which is said on standard error.
    fn judged_with(&self, engine: &EngineArgs, fault: Option<&str>) -> (EngineArgs, Option<String>) {
        let mut chosen = engine.clone();
        // the fault of a run belongs to its engine
        let same_engine = engine.engine.is_none() || engine.engine == self.engine;
        if let (None, Some(name)) = (&engine.engine, &self.engine) {
            eprintln!("on the engine of the run: {name}");
            chosen.engine = Some(name.clone());
        }
        let of_run = self.fault.clone().filter(|_| fault.is_none() && same_engine);
        if let Some(fault) = &of_run {
            eprintln!("with the fault of the run: {fault}");
        }
        (chosen, fault.map(str::to_owned).or(of_run))
    }

    /// The engine that is asked for, else that of the run, opened with the fault that is; and both by name.
    ///
    /// # Errors
    /// What opening an engine says.
    pub fn open(
        &self,
        engine: &EngineArgs,
        fault: Option<&str>,
        timeout_s: f64,
    ) -> Result<(OpenEngine, EngineArgs, Option<String>), CommandError> {
        let (chosen, fault) = self.judged_with(engine, fault);
        let engine = engines::open(&chosen, fault.as_deref(), timeout_s)?;
        Ok((engine, chosen, fault))
    }
}

/// Whether a text has the shape of a case id: a family in front of the first slash.
pub(super) fn begins_with_a_family(text: &str) -> bool {
    text.split_once('/').is_some_and(|(family, _)| family.parse::<Family>().is_ok())
}

/// The property of that id.
///
/// # Errors
/// Usage, with the id that was most likely meant.
pub(super) fn property(id: &str) -> Result<&'static Property, CommandError> {
    properties::find(id).ok_or_else(|| {
        let known = properties::all().map(|property| property.id);
        CommandError::usage(SelectError::UnknownProperty {
            id: id.to_owned(),
            nearest: nearest(id, known).map(str::to_owned),
        })
    })
}
