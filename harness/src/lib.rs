//! The harness: select → run → judge → explain → report.

mod accepting;
mod attribute;
pub mod bench;
pub mod boundary;
pub mod bugs;
pub mod check;
pub mod claims;
pub mod cli;
pub mod commands;
pub mod compressing;
pub mod coverage;
pub mod delta;
pub mod diagnose;
pub mod diff;
pub mod emit;
pub mod engines;
pub mod event;
pub mod execute;
pub mod expected;
pub mod explain;
pub mod export;
pub mod finding;
pub mod golden;
pub mod guard;
pub mod indexing;
pub mod judge;
pub mod laboratory;
pub mod layer;
mod localise;
pub mod material;
pub mod matrix;
pub mod measure;
pub mod merging;
pub mod mutants;
pub mod nearest;
pub mod patience;
pub mod prefilling;
pub mod probing;
pub mod progress;
pub mod properties;
mod quiet;
pub mod record;
pub mod recording;
pub mod report;
mod residual;
pub mod routing;
pub mod run;
pub mod run_directory;
pub mod select;
pub mod selecting;
pub mod self_test;
pub mod sequence;
pub mod sharing;
pub mod shrink;
pub mod stacking;
pub mod status;
pub mod store;
pub mod summary;
pub mod tally;

#[cfg(test)]
mod documentation;
#[cfg(test)]
mod sample;
#[cfg(test)]
mod verdicts;
