//! Events as JSON lines, for programs (`--message-format json`).

use std::io::Write;

use crate::event::Event;
use crate::report::{ReportError, Reporter};

/// Writes each event as one line, as it stands in events.jsonl.
pub struct JsonReporter<W> {
    out: W,
}

impl<W: Write> JsonReporter<W> {
    /// Writes to `out`, standard output as a rule.
    pub fn new(out: W) -> Self {
        Self { out }
    }
}

impl<W: Write> Reporter for JsonReporter<W> {
    fn event(&mut self, event: &Event) -> Result<(), ReportError> {
        let mut line = serde_json::to_string(event).expect("an event is plain data");
        line.push('\n');
        self.out
            .write_all(line.as_bytes())
            .and_then(|()| self.out.flush())
            .map_err(|source| ReportError::Stream { stream: "standard output", source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn each_event_is_one_line_that_reads_back() {
        let events = sample::events(&sample::header());
        let mut out = Vec::new();
        let mut reporter = JsonReporter::new(&mut out);
        events.iter().for_each(|event| reporter.event(event).unwrap());
        let text = String::from_utf8(out).unwrap();
        let back: Vec<Event> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(back, events);
    }

    #[test]
    fn a_closed_pipe_is_an_error_and_not_a_panic() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let error = JsonReporter::new(Closed).event(&sample::events(&sample::header())[0]).unwrap_err();
        assert!(matches!(error, ReportError::Stream { stream: "standard output", .. }));
    }
}
