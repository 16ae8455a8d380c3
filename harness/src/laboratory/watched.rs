//! The engine of a bench, and which inputs any of its steps changed.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use shardcheck_engine::{Engine, OperationKind};

/// Inputs that one step of a session changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Number of the step in its session, from 1.
    pub step: usize,
    /// What was asked.
    pub operation: OperationKind,
    /// Number of the KV group that was asked.
    pub group: usize,
    /// Names of the tensors, in the order of the inputs.
    pub tensors: Vec<String>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = if self.group == 0 { "" } else { " in the second KV group" };
        write!(
            f,
            "{} in step {} of a session ({}{group})",
            self.tensors.join(", "),
            self.step,
            self.operation
        )
    }
}

/// An engine whose sessions note what their steps change in their inputs, whichever property asked for them.
#[derive(Clone)]
pub struct Watched<'a> {
    /// The engine.
    pub engine: &'a dyn Engine,
    pub(super) changes: Rc<RefCell<Vec<Change>>>,
}

impl<'a> Watched<'a> {
    /// An engine that was asked nothing yet.
    pub fn new(engine: &'a dyn Engine) -> Self {
        Self { engine, changes: Rc::default() }
    }

    /// What was changed until now, in the order of the steps.
    pub fn changes(&self) -> Vec<Change> {
        self.changes.borrow().clone()
    }
}
