//! placeholder
/// x
#[derive(Debug, Clone, clap::Args)]
pub struct LogprobsArgs {}
/// x
/// # Errors
/// x
pub fn run(_: &LogprobsArgs) -> Result<crate::Outcome, crate::Error> {
    Ok(crate::Outcome::Passed)
}
