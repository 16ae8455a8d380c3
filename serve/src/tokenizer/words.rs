//! How a text is cut into words before merging.
//!
//! GPT-2's rule, in the notation of its regular expression:
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`. SmolLM first cuts out every
//! numeric character by itself. The rule is scanned by hand, as its lookahead needs a backtracking engine.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// A rule that cuts text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordRule {
    /// GPT-2's.
    Gpt2,
    /// SmolLM's: digits stand alone, the pieces between them follow GPT-2.
    SmolLm,
}

/// What the rule distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Space,
    Other,
}

const CONTRACTIONS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];

impl WordRule {
    /// The rule behind the value of `tokenizer.ggml.pre`.
    pub fn from_gguf_name(name: &str) -> Option<Self> {
        match name {
            "gpt-2" => Some(Self::Gpt2),
            "smollm" => Some(Self::SmolLm),
            _ => None,
        }
    }

    /// The words of a text in order; joined they are the text.
    pub fn split(self, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        match self {
            Self::Gpt2 => split_piece(text, &mut words),
            Self::SmolLm => {
                let mut rest = text;
                while let Some((at, digit)) = rest.char_indices().find(|(_, c)| c.is_numeric()) {
                    let end = at + digit.len_utf8();
                    split_piece(&rest[..at], &mut words);
                    words.push(&rest[at..end]);
                    rest = &rest[end..];
                }
                split_piece(rest, &mut words);
            }
        }
        words
    }
}

fn split_piece<'a>(piece: &'a str, words: &mut Vec<&'a str>) {
    let mut rest = piece;
    while !rest.is_empty() {
        let (word, tail) = rest.split_at(word_bytes(rest));
        words.push(word);
        rest = tail;
    }
}

/// Length in bytes of the first word of a text that is not empty.
fn word_bytes(text: &str) -> usize {
    if let Some(contraction) = CONTRACTIONS.iter().find(|c| text.starts_with(**c)) {
        return contraction.len();
    }
    let space = usize::from(text.starts_with(' '));
    match text[space..].chars().next().map(kind) {
        Some(kind) if kind != Kind::Space => space + run_bytes(&text[space..], kind),
        _ => {
            let run = run_bytes(text, Kind::Space);
            let last = text[..run].chars().next_back().map_or(0, char::len_utf8);
            // Before a word the last space of a run is left to it, unless there is no other.
            if run < text.len() && run > last { run - last } else { run }
        }
    }
}

fn run_bytes(text: &str, wanted: Kind) -> usize {
    text.find(|c| kind(c) != wanted).unwrap_or(text.len())
}

fn kind(c: char) -> Kind {
    match c {
        'a'..='z' | 'A'..='Z' => Kind::Letter,
        '\0'..='\x7f' if !c.is_ascii_digit() && !c.is_whitespace() => Kind::Other,
        c if c.is_whitespace() => Kind::Space,
        c if c.is_numeric() => Kind::Number,
        c if is_letter(c) => Kind::Letter,
        _ => Kind::Other,
    }
}

/// Whether a character is in `\p{L}` (which is narrower than [`char::is_alphabetic`]).
fn is_letter(c: char) -> bool {
    static LETTERS: OnceLock<Vec<(char, char)>> = OnceLock::new();
    let letters = LETTERS.get_or_init(|| {
        let class = regex_syntax::parse(r"\p{L}").expect("the Unicode tables hold category L");
        match class.kind() {
            HirKind::Class(Class::Unicode(class)) => class.iter().map(|r| (r.start(), r.end())).collect(),
            other => unreachable!("a Unicode class parses to a class, not {other:?}"),
        }
    });
    let after = letters.partition_point(|(start, _)| *start <= c);
    after > 0 && c <= letters[after - 1].1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(rule: WordRule, text: &str, words: &[&str]) {
        assert_eq!(rule.split(text), words, "{text:?}");
    }

    #[test]
    fn a_word_takes_one_space_before_it() {
        check(WordRule::Gpt2, "Hello world", &["Hello", " world"]);
        check(WordRule::Gpt2, "a  b", &["a", " ", " b"]);
        check(WordRule::Gpt2, "a\tb", &["a", "\t", "b"]);
        check(WordRule::Gpt2, "a \n b", &["a", " \n", " b"]);
        check(WordRule::Gpt2, "a\u{a0}\u{a0}b", &["a", "\u{a0}", "\u{a0}", "b"]);
    }

    #[test]
    fn spaces_at_the_end_stay_together() {
        check(WordRule::Gpt2, "a   ", &["a", "   "]);
        check(WordRule::Gpt2, " ", &[" "]);
        check(WordRule::Gpt2, "\n\n", &["\n\n"]);
    }

    #[test]
    fn contractions_are_cut_only_when_lower_case_and_at_the_apostrophe() {
        check(WordRule::Gpt2, "I'll've", &["I", "'ll", "'ve"]);
        check(WordRule::Gpt2, "I'LL", &["I", "'", "LL"]);
        check(WordRule::Gpt2, "it 's", &["it", " '", "s"]);
        check(WordRule::Gpt2, "'sun", &["'s", "un"]);
    }

    #[test]
    fn smollm_cuts_every_digit_and_gpt2_keeps_numbers() {
        check(WordRule::Gpt2, "in 2024.", &["in", " 2024", "."]);
        check(WordRule::SmolLm, "in 2024.", &["in", " ", "2", "0", "2", "4", "."]);
        check(WordRule::SmolLm, "a  1", &["a", "  ", "1"]);
        check(WordRule::SmolLm, "x½²Ⅷ", &["x", "½", "²", "Ⅷ"]);
    }

    #[test]
    fn letters_are_the_category_and_not_the_alphabetic_property() {
        assert!(is_letter('é') && is_letter('漢') && is_letter('ª'));
        let mark = '\u{0345}'; // alphabetic, but a mark
        assert!(mark.is_alphabetic() && !is_letter(mark));
        check(WordRule::Gpt2, "na\u{0345}b", &["na", "\u{0345}", "b"]);
    }

    proptest! {
        #[test]
        fn words_joined_are_the_text(text in "\\PC{0,40}|[ \\t\\n'a-z0-9.é漢]{0,60}") {
            for rule in [WordRule::Gpt2, WordRule::SmolLm] {
                let words = rule.split(&text);
                prop_assert!(words.iter().all(|word| !word.is_empty()));
                prop_assert_eq!(words.concat(), text.clone());
            }
        }
    }
}
