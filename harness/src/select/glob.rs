//! Whole-text patterns: `*` for any characters, `?` for one.

/// Glob with `*` and `?`: on a mismatch the last star takes one character more, so the time is at most the product of
/// the lengths.
pub(super) fn glob_matches(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                None => return false,
                Some((place, taken)) => {
                    star = Some((place, taken + 1));
                    p = place + 1;
                    t = taken + 1;
                }
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}
