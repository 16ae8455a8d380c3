//! Taking an answer out of a completion and comparing it with the gold answer, as lm-eval and vLLM's script do.

use std::sync::LazyLock;

use regex::Regex;

use crate::dialect::Filter;

/// What lm-eval puts in place of an answer that no pattern found.
pub const INVALID: &str = "[invalid]";

/// The answer of one completion under one filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scored {
    /// The extracted text, [`INVALID`] when nothing was found.
    pub extracted: String,
    /// Whether it counts as right.
    pub correct: bool,
}

impl Scored {
    /// Whether no answer was found at all.
    pub fn is_invalid(&self) -> bool {
        self.extracted == INVALID
    }
}

/// Scores a completion against the whole gold answer (`… #### N`) under one filter.
pub fn score(filter: Filter, completion: &str, gold: &str) -> Scored {
    match filter {
        Filter::StrictMatch => by_text(strict_extract(completion), gold),
        Filter::FlexibleExtract => by_text(flexible_extract(completion), gold),
        Filter::LastInt => {
            let answer = last_int(completion);
            let correct = answer.is_some() && answer == last_int(gold);
            Scored { extracted: answer.unwrap_or_else(|| INVALID.to_owned()), correct }
        }
    }
}

/// lm-eval `strict-match`: the first `#### ` with what looks like a number behind it.
pub fn strict_extract(completion: &str) -> Option<&str> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| pattern(r"#### (\-?[0-9\.\,]+)"));
    PATTERN.captures(completion).and_then(|found| found.get(1)).map(|group| group.as_str())
}

/// lm-eval `flexible-extract`: the last match of either kind of number.
pub fn flexible_extract(completion: &str) -> Option<&str> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| pattern(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"));
    PATTERN.find_iter(completion).last().map(|found| found.as_str())
}

/// vLLM `get_answer_value`: commas removed, the last run of digits read as a Python literal.
///
/// The value is returned as its canonical decimal digits. Digits of other scripts make a run, as `\d` does in
/// Python, but no literal; neither does a number with leading zeros.
pub fn last_int(completion: &str) -> Option<String> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| pattern(r"\d+"));
    let text = completion.replace(',', "");
    let digits = PATTERN.find_iter(&text).last()?.as_str();
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    if digits.bytes().all(|byte| byte == b'0') {
        return Some("0".to_owned());
    }
    (!digits.starts_with('0')).then(|| digits.to_owned())
}

/// lm-eval `exact_match` with the task's `regexes_to_ignore` and `ignore_case`, applied to both sides.
fn by_text(extracted: Option<&str>, gold: &str) -> Scored {
    let extracted = extracted.unwrap_or(INVALID);
    Scored { correct: normalise(extracted) == normalise(gold), extracted: extracted.to_owned() }
}

fn normalise(text: &str) -> String {
    let text = text.replace([',', '$'], "");
    // `(?s).*#### ` is greedy: everything up to the last mark goes.
    let text = text.rsplit_once("#### ").map_or(text.as_str(), |(_, tail)| tail);
    text.strip_suffix('.').unwrap_or(text).to_lowercase()
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a fixed pattern is valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLD: &str = "9 * 2 = $<<9*2=18>>18.\n#### 18";

    fn correct(filter: Filter, completion: &str) -> bool {
        score(filter, completion, GOLD).correct
    }

    #[test]
    fn equality_is_of_text_not_of_numbers() {
        for wrong in ["#### 18.0", "#### 018", "#### 18.00", "#### 18-20 is 19"] {
            assert!(!correct(Filter::FlexibleExtract, wrong), "{wrong}");
        }
        for right in ["#### 18", "#### 18.", "#### 1,8", "so 18"] {
            assert!(correct(Filter::FlexibleExtract, right), "{right}");
        }
        assert!(correct(Filter::StrictMatch, "#### 18-20"));
    }

    #[test]
    fn strict_needs_the_mark_the_space_and_nothing_before_the_digits() {
        for wrong in ["18", "####18", "#### $18", "#### +18"] {
            let scored = score(Filter::StrictMatch, wrong, GOLD);
            assert!(scored.is_invalid() && !scored.correct, "{wrong}");
        }
    }

    #[test]
    fn flexible_takes_the_last_match_even_if_it_is_only_dots() {
        assert_eq!(flexible_extract("18 dollars..."), Some("..."));
        assert_eq!(flexible_extract("it is -7"), Some("-7"));
        assert_eq!(flexible_extract("none"), None);
    }

    #[test]
    fn the_last_integer_ignores_signs_and_decimals_and_refuses_leading_zeros() {
        assert_eq!(last_int("-1,018"), Some("1018".to_owned()));
        assert_eq!(last_int("18.00"), Some("0".to_owned()));
        assert_eq!(last_int("018"), None);
        assert_eq!(last_int("18 or \u{661}"), None);
        assert!(correct(Filter::LastInt, "-18..."));
        assert!(!score(Filter::LastInt, "nothing", "nothing").correct);
    }
}
