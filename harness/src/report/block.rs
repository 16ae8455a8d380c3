//! The block of lines that a failed case gets, the same in every format.

use std::fmt;

use crate::event::{CaseResult, Check, RunHeader};
use crate::finding::{Failure, Finding};
use crate::report::Glossary;
use crate::status::Status;

/// One line of a block: a label and what it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What the line is about; empty for a line that continues the one above.
    pub label: &'static str,
    /// What it says: printable, no line end.
    pub text: String,
}

/// Everything that is told of a failed case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Verdict of the case.
    pub status: Status,
    /// Case id, printable.
    pub id: String,
    /// The lines, property by property, the command that reproduces it last.
    pub lines: Vec<Line>,
}

/// What a case was judged on, for the command that judges it again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Origin<'a> {
    /// Engine as it was given on the command line.
    pub engine: &'a str,
    /// Fault that was injected.
    pub fault: Option<&'a str>,
    /// Seconds that ranks might wait for each other, where it was said: a hang shows as soon again.
    pub timeout_s: Option<f64>,
}

impl<'a> From<&'a RunHeader> for Origin<'a> {
    fn from(header: &'a RunHeader) -> Self {
        Self { engine: &header.engine, fault: header.fault.as_deref(), timeout_s: header.timeout_s }
    }
}

impl Block {
    /// The block of a case.
    pub fn of(result: &CaseResult, origin: Option<Origin<'_>>, glossary: &Glossary) -> Self {
        let mut block = Self { status: result.status, id: printable(&result.id), lines: Vec::new() };
        for check in result.failures() {
            block.add_check(check, glossary);
        }
        if let Some(reason) = &result.reason {
            block.add("reason", reason);
        }
        block.add("reproduce", &replay_command(&result.id, origin));
        block
    }

    fn add_check(&mut self, check: &Check, glossary: &Glossary) {
        match glossary.sentence(&check.property) {
            Some(sentence) => self.add("property", &format!("{}: {sentence}", check.property)),
            None => self.add("property", &check.property),
        }
        match &check.finding {
            Finding::Broken(failure) => self.add_failure(failure),
            Finding::Engine { status, text } => self.add("engine", &format!("{status}: {text}")),
            Finding::Holds(_) => self.add("found", "holds, although the claims file says that it must fail"),
            Finding::Inconclusive(text) | Finding::Unsupported(text) => self.add("found", text),
        }
    }

    fn add_failure(&mut self, failure: &Failure) {
        self.add("found", &failure.headline);
        if let Some(worst) = &failure.worst {
            self.add("worst", &format!("{} at {}", worst.tensor, worst.place));
            let ratio = worst.ratio.map_or(String::new(), |ratio| format!(", {} × the bound", short(ratio)));
            self.add(
                "seen",
                &format!("{}; expected {}; allowed {}{ratio}", worst.seen, worst.expected, worst.allowed),
            );
        }
        if failure.compared > 0 {
            let (out, compared) = (failure.out_of_bound, failure.compared);
            self.add("out of bound", &format!("{out} of {compared} elements compared"));
        }
        if let Some(stage) = failure.stage {
            self.add("first stage", &format!("{stage}: the first stage that diverges"));
        }
        for note in &failure.notes {
            self.add("note", note);
        }
    }

    /// Adds a text; what stands behind its line ends continues it.
    fn add(&mut self, label: &'static str, text: &str) {
        for (index, line) in text.lines().enumerate() {
            self.lines.push(Line { label: if index == 0 { label } else { "" }, text: printable(line) });
        }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.status, self.id)?;
        for line in &self.lines {
            writeln!(f, "{:>14}  {}", line.label, line.text)?;
        }
        Ok(())
    }
}

/// The command that runs a case again, on the engine and with the fault that it failed with.
pub fn replay_command(id: &str, origin: Option<Origin<'_>>) -> String {
    let mut command = format!("shardcheck replay {}", shell_quoted(id));
    if let Some(origin) = origin {
        if origin.engine != "cpu" {
            command += &format!(" --engine {}", shell_quoted(origin.engine));
        }
        if let Some(fault) = origin.fault {
            command += &format!(" --fault {}", shell_quoted(fault));
        }
        if let Some(seconds) = origin.timeout_s {
            command += &format!(" --timeout-s {seconds}");
        }
    }
    command
}

/// What a failing case fails of: the property and the first stage that diverges, or the kind of breakdown. Cases of one
/// root cause are told together.
pub fn root_cause(check: &Check) -> (String, String) {
    let what = match &check.finding {
        Finding::Broken(failure) => failure.stage.map_or("no stage told", |stage| stage.name()).to_owned(),
        other => other.status().name().to_owned(),
    };
    (check.property.clone(), what)
}

/// A ratio in few digits. What lies next to 1 but is not 1 says so, because 1 is where a bound ends.
pub fn short(ratio: f64) -> String {
    let past = ratio - 1.0;
    if past != 0.0 && past.abs() < 5e-4 {
        return format!("1 {} {:.1e}", if past > 0.0 { '+' } else { '−' }, past.abs());
    }
    match ratio.abs() {
        size if size >= 1e4 || (size > 0.0 && size < 1e-3) => format!("{ratio:.2e}"),
        size if size >= 100.0 => format!("{ratio:.0}"),
        size if size >= 10.0 => format!("{ratio:.1}"),
        _ => format!("{ratio:.3}"),
    }
}

/// The text with its control characters spelt out: what an engine says must not steer the terminal.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

/// The text as one word of a POSIX shell.
pub fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn glossary() -> Glossary {
        Glossary::new([(
            "attention.bound",
            "the output is attention over the visible keys, within its bound",
        )])
    }

    #[test]
    fn a_block_says_everything_that_is_known_and_ends_with_the_command() {
        let result = sample::failed("verify/tiny-mla@w4", sample::failure());
        let expected = "fail verify/tiny-mla@w4
      property  attention.bound: the output is attention over the visible keys, within its bound
         found  the merged output misses its bound
         worst  out at rank 1, request 0 row 2 (position 258), head 5, dim 17
          seen  1.25; expected 1.0; allowed [0.99, 1.01], 25.0 × the bound
  out of bound  12 of 4096 elements compared
   first stage  merge: the first stage that diverges
          note  rows 2 and 3 attended token 259, which they must not see
     reproduce  shardcheck replay 'verify/tiny-mla@w4'
";
        assert_eq!(Block::of(&result, Some((&sample::header()).into()), &glossary()).to_string(), expected);
    }

    #[test]
    fn a_property_without_a_sentence_is_named_alone() {
        let result = sample::failed("verify/a", sample::failure());
        let block = Block::of(&result, None, &Glossary::default());
        assert_eq!(block.lines[0], Line { label: "property", text: "attention.bound".into() });
    }

    #[test]
    fn the_command_names_the_engine_and_the_fault_and_survives_a_shell() {
        let header = RunHeader {
            engine: "process:./adapter --flag".into(),
            fault: Some("drop-rank".into()),
            ..sample::header()
        };
        let command = replay_command("verify/it's $HOME", Some((&header).into()));
        assert_eq!(
            command,
            "shardcheck replay 'verify/it'\\''s $HOME' --engine 'process:./adapter --flag' --fault 'drop-rank'"
        );
        let waits = RunHeader { timeout_s: Some(2.5), ..sample::header() };
        assert_eq!(
            replay_command("verify/a", Some((&waits).into())),
            "shardcheck replay 'verify/a' --timeout-s 2.5"
        );
        let script = command.replace("shardcheck replay", "printf '%s|'");
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let words = String::from_utf8(output.stdout).unwrap();
        assert_eq!(words, "verify/it's $HOME|--engine|process:./adapter --flag|--fault|drop-rank|");
    }

    #[test]
    fn what_an_engine_says_cannot_steer_the_terminal() {
        let mut failure = sample::failure();
        failure.headline = "\u{1b}[2Jgone\r\nsecond line".into();
        let text =
            Block::of(&sample::failed("verify/\u{7}a", failure), None, &Glossary::default()).to_string();
        assert!(text.chars().all(|c| !c.is_control() || c == '\n'), "{text:?}");
        assert!(text.contains("\\u{1b}[2Jgone") && text.contains("second line"), "{text}");
    }

    #[test]
    fn a_ratio_just_past_the_bound_does_not_look_like_the_bound() {
        assert_eq!(short(1.0), "1.000");
        assert_eq!(short(1.0 + f64::EPSILON), "1 + 2.2e-16");
        assert_eq!(short(1.0 - 1e-5), "1 − 1.0e-5");
        assert_eq!(short(1.001), "1.001");
    }

    #[test]
    fn ratios_are_short_at_every_size() {
        for (ratio, text) in [
            (0.0, "0.000"),
            (0.5, "0.500"),
            (25.0, "25.0"),
            (123.4, "123"),
            (1e6, "1.00e6"),
            (1e-7, "1.00e-7"),
        ] {
            assert_eq!(short(ratio), text);
        }
    }
}
