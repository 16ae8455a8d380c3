//! The dotted tokens of a part of an id, and the numbers in them.

use shardcheck_engine::{CommBackend, LaneOrder};

/// The dotted tokens of one part of an id; each may be taken once, and none may be left.
pub(crate) struct Tokens {
    rest: Vec<String>,
    /// What was asked for with a number behind it, and whether it was there.
    asked: Vec<(String, bool)>,
    /// Names that were taken.
    taken: Vec<String>,
}

impl Tokens {
    pub(crate) fn split(text: &str) -> Self {
        let mut rest: Vec<String> = Vec::new();
        for piece in text.split('.') {
            match rest.last_mut() {
                // every token starts with a letter, so a digit behind a dot is the fraction of a number
                Some(last) if piece.starts_with(|c: char| c.is_ascii_digit()) => {
                    last.push('.');
                    last.push_str(piece);
                }
                _ => rest.push(piece.to_owned()),
            }
        }
        Self { rest, asked: Vec::new(), taken: Vec::new() }
    }

    /// Takes the first token that `wanted` accepts.
    pub(crate) fn take<T>(&mut self, wanted: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (index, value) = self
            .rest
            .iter()
            .enumerate()
            .find_map(|(index, token)| wanted(token).map(|value| (index, value)))?;
        self.taken.push(self.rest.remove(index));
        Some(value)
    }

    pub(crate) fn take_number(&mut self, key: &str) -> Option<usize> {
        let number = self.take(|token| token.strip_prefix(key)?.parse().ok());
        self.asked.push((key.to_owned(), number.is_some()));
        number
    }

    pub(crate) fn need_number(&mut self, key: &str) -> Result<usize, String> {
        self.take_number(key).ok_or_else(|| {
            let misread = self.rest.iter().find_map(|token| misread(key, token));
            misread.unwrap_or_else(|| format!("{key:?} with a whole number is missing"))
        })
    }

    /// Takes the first token that names one of the values.
    pub(crate) fn need<T: Copy>(
        &mut self,
        what: &str,
        all: &[T],
        name: fn(T) -> &'static str,
    ) -> Result<T, String> {
        self.take(|token| all.iter().copied().find(|value| name(*value) == token)).ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
            format!("the {what} is missing: {}", names.join(", "))
        })
    }

    pub(crate) fn take_flag(&mut self, name: &str) -> bool {
        self.take(|token| (token == name).then_some(())).is_some()
    }

    pub(crate) fn take_exchange(&mut self) -> Result<(CommBackend, LaneOrder), String> {
        let backend = self
            .take(|token| CommBackend::ALL.into_iter().find(|backend| backend.name() == token))
            .ok_or("the exchange is missing: ag_rs or a2a")?;
        let lane_order = self.take(|token| LaneOrder::ALL.into_iter().find(|order| order.name() == token));
        match (backend, lane_order) {
            (CommBackend::A2a, None) => Err("the lane order of a2a is missing: hi_lo or lo_hi".to_owned()),
            (_, lane_order) => Ok((backend, lane_order.unwrap_or(LaneOrder::HiLo))),
        }
    }

    pub(crate) fn finish(self) -> Result<(), String> {
        let Some(token) = self.rest.first() else { return Ok(()) };
        if token.is_empty() {
            return Err(
                "two dots stand beside each other, or one at an end: nothing is between them".to_owned()
            );
        }
        let again = |(key, found): &(String, bool)| {
            *found && token.strip_prefix(key.as_str()).is_some_and(|rest| rest.parse::<usize>().is_ok())
        };
        if self.taken.contains(token) || self.asked.iter().any(again) {
            return Err(format!("{token:?} stands there for the second time: leave one out"));
        }
        // `pcp` and not `p`: the longest name is the one that was meant
        let mut keys: Vec<&str> = self.asked.iter().map(|(key, _)| key.as_str()).collect();
        keys.sort_by_key(|key| std::cmp::Reverse(key.len()));
        let misread = keys.into_iter().find_map(|key| misread(key, token));
        Err(misread.unwrap_or_else(|| format!("{token:?} is unknown here")))
    }
}

/// Why a token is no number behind its name, where it looks as if it were to be one.
fn misread(key: &str, token: &str) -> Option<String> {
    let rest = token.strip_prefix(key)?;
    let is_meant = rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    if !is_meant || rest.parse::<usize>().is_ok() {
        return None;
    }
    Some(format!("{token:?} is not {key} with {}", wanted(rest)))
}

/// What a text that is no whole number should be.
fn wanted(text: &str) -> String {
    let digits = !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    if digits { format!("a number up to {}", usize::MAX) } else { "a whole number".to_owned() }
}

/// The whole number that stands behind `key` in a text that holds nothing else.
///
/// # Errors
/// What stands there, and what should.
pub(crate) fn keyed(key: &str, text: &str) -> Result<usize, String> {
    let number =
        text.strip_prefix(key).ok_or_else(|| format!("{text:?} is not {key} with a whole number"))?;
    number.parse().map_err(|_| match key {
        "" => format!("{text:?} is not {}", wanted(number)),
        _ => format!("{text:?} is not {key} with {}", wanted(number)),
    })
}

/// A whole number.
///
/// # Errors
/// Of what, what stands there, and what should.
pub(crate) fn number<T: std::str::FromStr>(what: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{what} {text:?} is not {}", wanted(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(text: &str) -> String {
        let mut tokens = Tokens::split(text);
        let _ = (tokens.take_number("p"), tokens.take_number("pcp"), tokens.take_flag("whole"));
        tokens.finish().unwrap_err()
    }

    #[test]
    fn what_is_left_is_told_from_what_stands_twice_and_from_what_is_no_number() {
        for (text, reason) in [
            ("pcp2.pcp2", "\"pcp2\" stands there for the second time"),
            ("pcp2.pcp3", "\"pcp3\" stands there for the second time"),
            ("whole.whole", "second time"),
            ("pcp99999999999999999999", "is not pcp with a number up to 18446744073709551615"),
            ("pcp-2", "\"pcp-2\" is not pcp with a whole number"),
            ("pcp", "\"pcp\" is not pcp with a whole number"),
            ("pcp2..whole", "two dots"),
            ("pcpx", "\"pcpx\" is unknown here"),
            ("wholes", "\"wholes\" is unknown here"),
        ] {
            let error = left(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_number_that_is_needed_and_is_none_is_told_with_what_stands_there() {
        for (text, reason) in [
            ("h2", "\"pcp\" with a whole number is missing"),
            ("pcp2.5", "\"pcp2.5\" is not pcp with a whole number"),
            ("pcp99999999999999999999", "a number up to"),
        ] {
            let error = Tokens::split(text).need_number("pcp").unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
