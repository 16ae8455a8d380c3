//! How results reach standard output.

use std::fmt::Display;

use clap::ValueEnum;
use serde::Serialize;

/// The form of a printed result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON document.
    Json,
}

/// Prints a result in the chosen form.
pub fn print(format: Format, json: &impl Serialize, text: &impl Display) {
    match format {
        Format::Text => print!("{text}"),
        Format::Json => {
            println!("{}", serde_json::to_string_pretty(json).expect("results are always JSON"))
        }
    }
}
