//! How faults do on the failed cases: each is tried on the smallest first, and on the others when it explains that one.

use std::sync::Mutex;

use rayon::prelude::*;
use shardcheck_cpu::{Fault, faults};

use super::budget::Budget;
use super::evidence::{Evidence, Reproduction};
use super::stages::agrees;

/// What a fault did on one case.
#[derive(Debug, Clone, PartialEq)]
enum Tried {
    /// It was not tried.
    Not,
    /// It does not give the wrong answers.
    Unlike,
    /// It gives them.
    Like(Reproduction),
}

/// How one fault does on each case.
pub(super) struct Fit {
    pub fault: &'static Fault,
    cases: Vec<Tried>,
}

/// Tries faults in their order as far as the budget goes. A fault that does not explain the smallest case can't explain all: it is
/// tried on the others only where no fault explains all.
pub(super) fn fits_of(order: Vec<&'static Fault>, evidence: &[&Evidence], budget: &Budget) -> Vec<Fit> {
    let untried = |fault| Fit { fault, cases: vec![Tried::Not; evidence.len()] };
    let mut fits: Vec<Fit> = order.into_iter().map(untried).collect();
    in_turn(&mut fits, &|fit| {
        for (case, evidence) in evidence.iter().enumerate() {
            // what explains one case is worth the time that the others take; what can't show in it takes none
            let is_paid = case > 0 || !evidence.concerns(fit.fault) || budget.take();
            if !is_paid || !matches!(fit.try_case(case, evidence), Tried::Like(_)) {
                break;
            }
        }
    });
    if !fits.iter().any(Fit::explains_all) {
        in_turn(&mut fits, &|fit| {
            for (case, evidence) in evidence.iter().enumerate() {
                if fit.cases[case] == Tried::Not && (!evidence.concerns(fit.fault) || budget.take()) {
                    fit.try_case(case, evidence);
                }
            }
        });
    }
    fits
}

/// One after the other on all threads: none is begun before those in front of it are.
fn in_turn(fits: &mut [Fit], work: &(dyn Fn(&mut Fit) + Sync)) {
    let rest = Mutex::new(fits.iter_mut());
    let next = || rest.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
    (0..rayon::current_num_threads()).into_par_iter().with_max_len(1).for_each(|_| {
        while let Some(fit) = next() {
            work(fit);
        }
    });
}

impl Fit {
    fn try_case(&mut self, case: usize, evidence: &Evidence) -> &Tried {
        self.cases[case] = evidence.try_fault(self.fault).map_or(Tried::Unlike, Tried::Like);
        &self.cases[case]
    }

    fn reproductions(&self) -> impl Iterator<Item = &Reproduction> {
        self.cases.iter().filter_map(|case| match case {
            Tried::Like(reproduction) => Some(reproduction),
            _ => None,
        })
    }

    /// Evidence that it explains.
    fn explained<'a>(&'a self, evidence: &'a [&Evidence]) -> impl Iterator<Item = &'a Evidence> {
        let pairs = evidence.iter().zip(&self.cases);
        pairs.filter(|(_, case)| matches!(case, Tried::Like(_))).map(|(evidence, _)| *evidence)
    }

    pub fn explains(&self) -> usize {
        self.reproductions().count()
    }

    pub fn explains_all(&self) -> bool {
        self.explains() == self.cases.len()
    }

    /// Whether what was tried of it suffices to say that it fits or does not: one case does where another fault explains them all.
    pub fn is_decided(&self, is_whole: bool) -> bool {
        self.explains() > 0
            || is_whole && self.cases[0] != Tried::Not
            || self.cases.iter().all(|case| *case != Tried::Not)
    }

    /// Whether time was spent on it.
    pub fn is_tried(&self, evidence: &[&Evidence]) -> bool {
        let pairs = self.cases.iter().zip(evidence);
        pairs.into_iter().any(|(case, evidence)| *case != Tried::Not && evidence.concerns(self.fault))
    }

    pub fn is_exact(&self) -> bool {
        self.reproductions().all(|reproduction| reproduction.exact)
    }

    pub fn beside(&self) -> usize {
        self.reproductions().map(|reproduction| reproduction.beside).sum()
    }

    pub fn distance(&self) -> f64 {
        self.reproductions().map(|reproduction| reproduction.distance).sum::<f64>()
            / self.explains().max(1) as f64
    }

    pub fn stage_agrees(&self, evidence: &[&Evidence]) -> bool {
        self.explained(evidence)
            .filter_map(|evidence| evidence.stage)
            .all(|stage| agrees(self.fault.class, stage))
    }

    /// Whether a failed property is one that the fault names, on all cases.
    fn is_named(&self, evidence: &[&Evidence]) -> bool {
        let named = |evidence: &Evidence| {
            evidence.properties.iter().any(|property| self.fault.killed_by.contains(&property.as_str()))
        };
        self.explained(evidence).all(named)
    }

    /// Smaller is better: cases left unexplained, then bits, parts beside the wrong ones, properties, stage, distance, order of
    /// the list of faults.
    fn rank(&self, evidence: &[&Evidence]) -> (usize, bool, usize, bool, bool, f64, usize) {
        let place = faults().iter().position(|fault| fault.name == self.fault.name).unwrap_or(usize::MAX);
        (
            evidence.len() - self.explains(),
            !self.is_exact(),
            self.beside(),
            !self.is_named(evidence),
            !self.stage_agrees(evidence),
            self.distance(),
            place,
        )
    }

    fn effects(&self) -> Vec<Option<[u8; 32]>> {
        let effect = |case: &Tried| match case {
            Tried::Like(reproduction) => Some(reproduction.effect),
            _ => None,
        };
        self.cases.iter().map(effect).collect()
    }
}

/// Faults that answer the same on every case, together; the best first, in a group and of the groups.
pub(super) fn group(mut fits: Vec<Fit>, evidence: &[&Evidence]) -> Vec<Vec<Fit>> {
    fits.sort_by(|a, b| a.rank(evidence).partial_cmp(&b.rank(evidence)).unwrap_or(std::cmp::Ordering::Equal));
    let mut groups: Vec<Vec<Fit>> = Vec::new();
    for fit in fits {
        match groups.iter_mut().find(|group| group[0].effects() == fit.effects()) {
            Some(group) => group.push(fit),
            None => groups.push(vec![fit]),
        }
    }
    groups
}
