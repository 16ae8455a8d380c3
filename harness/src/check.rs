//! One call of a user's own function, judged by itself: tensors in one file, a header that says what they are.
//!
//! No engine and no adapter is involved: [`check`] reads an image (docs/check.md), computes what the call may have returned
//! from the values as they are stored, judges every element by its own interval, and says which known slip gives the answer
//! that was seen.

mod addressing;
mod attention;
mod call;
mod diagnosis;
mod error;
mod header;
mod hypothesis;
mod image;
mod layouts;
mod merges;
mod prediction;
mod report;
mod sizes;
mod state;
mod tally;
mod target;
mod tokens;
mod whole;

pub use error::CheckError;
pub use header::{
    ContractChoice, EmptyRows, Header, LseLayout, PageLayout, Preset, SCHEMA_VERSION, Subject, UnknownPreset,
};
pub use hypothesis::Hypothesis;
pub use image::{METADATA_KEY, pack, unpack};
pub use layouts::LayoutHypothesis;
pub use merges::MergeHypothesis;
pub use report::{Diagnosis, Explanation, FixedTolerance, Report};

/// Judges the call that an image holds.
///
/// # Errors
/// [`CheckError`] when the image, its header or a shape is wrong: nothing was judged then.
pub fn check(image: &[u8]) -> Result<Report, CheckError> {
    let (header, tensors) = unpack(image)?;
    header.check_world()?;
    match header.check {
        Subject::Decode | Subject::Verify => attention::judge(&call::Call::read(&header, &tensors)?),
        Subject::Merge => merges::judge(&header, &tensors),
        Subject::Layout => layouts::judge(&header, &tensors),
    }
}

#[cfg(test)]
mod tests;
