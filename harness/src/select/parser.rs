//! Reads a filter expression, and says where and why one does not parse.

use std::fmt;
use std::ops::Range;

use super::axis::meant_by;
use super::{Atom, Axis, Expression, NumberTest, TextAxis, TextTest};
use crate::nearest::nearest;

/// Nesting beyond this is refused, so that no text can exhaust the stack.
const MAX_DEPTH: usize = 64;

/// What is wrong with an expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpressionErrorKind {
    /// An axis was expected and something else, or nothing, stands there.
    ExpectedAtom,
    /// Something stands behind a whole expression.
    ExpectedOperator,
    /// A name that is no axis.
    UnknownAxis {
        /// The name.
        name: String,
    },
    /// An axis without parentheses.
    ExpectedValues {
        /// The axis.
        axis: Axis,
    },
    /// Empty parentheses, or nothing between two bars.
    EmptyValue {
        /// The axis.
        axis: Axis,
    },
    /// A name that the axis does not have.
    UnknownValue {
        /// The axis.
        axis: Axis,
        /// The name.
        value: String,
    },
    /// No whole number, comparison or range.
    NotANumber {
        /// The axis.
        axis: Axis,
        /// What stands there.
        value: String,
    },
    /// A range that holds nothing.
    EmptyRange,
    /// A switch with more than one value.
    OneValueOnly {
        /// The axis.
        axis: Axis,
    },
    /// A parenthesis that is not closed.
    Unclosed,
    /// A quotation mark that is not closed, or text behind it.
    BadQuote,
    /// A glob without its closing slash.
    OpenGlob,
    /// Too many parentheses or negations inside each other.
    TooDeep,
}

/// An expression that does not parse. Its text has the offending place marked, and what could stand there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpressionError {
    /// The whole expression.
    pub expression: String,
    /// Bytes of the offending place.
    pub span: Range<usize>,
    /// What is wrong.
    pub kind: ExpressionErrorKind,
}

impl std::error::Error for ExpressionError {}

impl fmt::Display for ExpressionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let printable =
            |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
        let before = self.expression[..self.span.start].chars().count();
        let marked = self.expression[self.span.clone()].chars().count().max(1);
        writeln!(f, "{}", self.kind)?;
        writeln!(f, "  {}", printable(&self.expression))?;
        writeln!(f, "  {}{}", " ".repeat(before), "^".repeat(marked))?;
        f.write_str(&self.kind.help())
    }
}

impl fmt::Display for ExpressionErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meant = |value: &str, known: Vec<&str>| match nearest(value, known) {
            Some(name) => format!("; did you mean {name:?}?"),
            None => String::new(),
        };
        match self {
            Self::ExpectedAtom => f.write_str("an axis such as family(verify) is expected here"),
            Self::ExpectedOperator => f.write_str("`&`, `|` or the end is expected here"),
            Self::UnknownAxis { name } => {
                let meant = meant_by(name).map_or_else(String::new, |own| format!("; did you mean {own:?}?"));
                write!(f, "unknown axis {name:?}{meant}")
            }
            Self::ExpectedValues { axis } => {
                write!(f, "{0} takes its value in parentheses: {0}(…)", axis.name())
            }
            Self::EmptyValue { axis } => write!(f, "{}() lacks a value here", axis.name()),
            Self::UnknownValue { axis, value } => {
                write!(f, "unknown {} {value:?}{}", axis.name(), meant(value, axis.values()))
            }
            Self::NotANumber { axis, value } => {
                write!(f, "{}() takes whole numbers, and {value:?} is none", axis.name())
            }
            Self::EmptyRange => f.write_str("the range holds nothing: its end lies before its start"),
            Self::OneValueOnly { axis } => write!(f, "{}() takes one value", axis.name()),
            Self::Unclosed => f.write_str("the parenthesis that opens here is not closed"),
            Self::BadQuote => f.write_str("the quoted text that starts here does not end with its value"),
            Self::OpenGlob => f.write_str("a glob stands between two slashes"),
            Self::TooDeep => write!(f, "more than {MAX_DEPTH} parentheses or negations inside each other"),
        }
    }
}

impl ExpressionErrorKind {
    /// What could stand at the offending place.
    fn help(&self) -> String {
        let axes = || Axis::ALL.map(Axis::name).join(", ");
        match self {
            Self::ExpectedAtom | Self::UnknownAxis { .. } => format!("axes: {}", axes()),
            Self::ExpectedOperator => "combine with `&` (and), `|` (or), `not`, and parentheses".to_owned(),
            Self::ExpectedValues { axis } | Self::EmptyValue { axis } => help_on_values(*axis),
            Self::UnknownValue { axis, .. } | Self::NotANumber { axis, .. } => help_on_values(*axis),
            Self::OneValueOnly { axis } => help_on_values(*axis),
            Self::EmptyRange => "both ends belong to a range: 2..=8".to_owned(),
            Self::Unclosed => "close it with `)`".to_owned(),
            Self::BadQuote => {
                "write \"…\", with \\\" for a quotation mark and \\\\ for a backslash inside".to_owned()
            }
            Self::OpenGlob => "write /decode*w8/, or ~/text for a text that starts with a slash".to_owned(),
            Self::TooDeep => "write the expression flatter, or select with a --caselist".to_owned(),
        }
    }
}

fn help_on_values(axis: Axis) -> String {
    match axis {
        Axis::Number(_) => {
            format!("write {0}(4), {0}(>=4), {0}(2..=8) or {0}(1 | 4); also != < <= >", axis.name())
        }
        Axis::Text(text) if axis.values().is_empty() => {
            let bare = if text == TextAxis::Id { "a part" } else { "the whole" };
            format!("write ~part, =whole or /glob/; a bare text is {bare} of it")
        }
        _ => format!("values of {}: {}", axis.name(), axis.values().join(", ")),
    }
}

/// Reads an expression.
pub(super) fn parse(text: &str) -> Result<Expression, ExpressionError> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    let expression = parser.or()?;
    parser.skip_blanks();
    if parser.at < text.len() {
        let end = text[parser.at..].find(char::is_whitespace).map_or(text.len(), |n| parser.at + n);
        return Err(parser.error(parser.at..end, ExpressionErrorKind::ExpectedOperator));
    }
    Ok(expression)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

/// A value as it stands between parentheses or bars.
struct RawValue {
    /// Marks around it: `~`, `=`, `/`, or none.
    mark: Option<char>,
    text: String,
    span: Range<usize>,
}

impl Parser<'_> {
    fn or(&mut self) -> Result<Expression, ExpressionError> {
        let mut left = self.and()?;
        while self.take_operator(&["||", "|", "or"]) {
            left = Expression::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expression, ExpressionError> {
        let mut left = self.not()?;
        while self.take_operator(&["&&", "&", "and"]) {
            left = Expression::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expression, ExpressionError> {
        self.skip_blanks();
        let start = self.at;
        if self.take_operator(&["!", "not"]) {
            return self.deeper(start, |parser| Ok(Expression::Not(Box::new(parser.not()?))));
        }
        if !self.take("(") {
            return self.atom().map(Expression::Atom);
        }
        self.deeper(start, |parser| {
            let inner = parser.or()?;
            parser.skip_blanks();
            if parser.take(")") {
                Ok(inner)
            } else if parser.at == parser.text.len() {
                Err(parser.error(start..start + 1, ExpressionErrorKind::Unclosed))
            } else {
                Err(parser.error_here(ExpressionErrorKind::ExpectedOperator))
            }
        })
    }

    fn deeper(
        &mut self,
        start: usize,
        parse: impl FnOnce(&mut Self) -> Result<Expression, ExpressionError>,
    ) -> Result<Expression, ExpressionError> {
        if self.depth == MAX_DEPTH {
            return Err(self.error(start..self.at, ExpressionErrorKind::TooDeep));
        }
        self.depth += 1;
        let result = parse(self);
        self.depth -= 1;
        result
    }

    fn atom(&mut self) -> Result<Atom, ExpressionError> {
        let start = self.at;
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        let length = self.rest().find(|c| !is_name(c)).unwrap_or(self.rest().len());
        if length == 0 {
            return Err(self.error_here(ExpressionErrorKind::ExpectedAtom));
        }
        let name = &self.text[start..start + length];
        let span = start..start + length;
        let Some(axis) = Axis::find(name) else {
            return Err(self.error(span, ExpressionErrorKind::UnknownAxis { name: name.to_owned() }));
        };
        self.at += length;
        self.skip_blanks();
        let open = self.at;
        if !self.take("(") {
            return Err(self.error(span, ExpressionErrorKind::ExpectedValues { axis }));
        }
        let values = self.values(axis, open)?;
        self.build(axis, &values)
    }

    fn values(&mut self, axis: Axis, open: usize) -> Result<Vec<RawValue>, ExpressionError> {
        let mut values = Vec::new();
        loop {
            let value = self.value(axis)?;
            if value.text.is_empty() && value.mark.is_none() {
                if self.at == self.text.len() {
                    return Err(self.error(open..open + 1, ExpressionErrorKind::Unclosed));
                }
                return Err(self.error_here(ExpressionErrorKind::EmptyValue { axis }));
            }
            values.push(value);
            if self.take(")") {
                return Ok(values);
            }
            if !self.take("|") {
                return Err(self.error(open..open + 1, ExpressionErrorKind::Unclosed));
            }
        }
    }

    /// One value, up to the bar or parenthesis that ends it.
    fn value(&mut self, axis: Axis) -> Result<RawValue, ExpressionError> {
        self.skip_blanks();
        let start = self.at;
        let is_text = matches!(axis, Axis::Text(_));
        let mut mark = None;
        if is_text && let Some(c) = self.rest().chars().next().filter(|c| "~=/".contains(*c)) {
            mark = Some(c);
            self.at += 1;
        }
        let text = if self.rest().starts_with('"') {
            let text = self.quoted()?;
            if mark == Some('/') && !self.take("/") {
                return Err(self.error(start..self.at, ExpressionErrorKind::OpenGlob));
            }
            self.skip_blanks();
            if !(self.rest().is_empty() || self.rest().starts_with(['|', ')'])) {
                return Err(self.error(start..self.at, ExpressionErrorKind::BadQuote));
            }
            text
        } else {
            let length = self.rest().find(['|', ')', '(']).unwrap_or(self.rest().len());
            let raw = self.rest()[..length].trim_end();
            let bare = if mark == Some('/') { raw.strip_suffix('/') } else { Some(raw) };
            let (bare, end) = (bare.map(str::to_owned), self.at + raw.len());
            let Some(bare) = bare else {
                return Err(self.error(start..end, ExpressionErrorKind::OpenGlob));
            };
            self.at += length;
            if bare.is_empty() && mark.is_some() {
                return Err(self.error(start..end, ExpressionErrorKind::EmptyValue { axis }));
            }
            return Ok(RawValue { mark, text: bare, span: start..end });
        };
        // an explicit pair of quotes may hold nothing; it is marked so that it does not read as a missing value
        Ok(RawValue { mark: mark.or(Some('"')), text, span: start..self.at })
    }

    fn quoted(&mut self) -> Result<String, ExpressionError> {
        let start = self.at;
        let mut text = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((offset, c)) = chars.next() {
            match c {
                '"' => {
                    self.at = start + offset + 1;
                    return Ok(text);
                }
                '\\' => match chars.next() {
                    Some((_, c @ ('"' | '\\'))) => text.push(c),
                    _ => break,
                },
                _ => text.push(c),
            }
        }
        Err(self.error(start..self.text.len(), ExpressionErrorKind::BadQuote))
    }

    fn build(&self, axis: Axis, values: &[RawValue]) -> Result<Atom, ExpressionError> {
        match axis {
            Axis::Choice(choice) => {
                let names = values.iter().map(|value| self.known(axis, value)).collect::<Result<_, _>>()?;
                Ok(Atom::Choice(choice, names))
            }
            Axis::Number(number) => {
                let tests =
                    values.iter().map(|value| self.number_test(axis, value)).collect::<Result<_, _>>()?;
                Ok(Atom::Number(number, tests))
            }
            Axis::Truth(truth) => match values {
                [value] => Ok(Atom::Truth(truth, self.known(axis, value)? == "true")),
                _ => Err(self.error(values[1].span.clone(), ExpressionErrorKind::OneValueOnly { axis })),
            },
            Axis::Text(text) => {
                let tests =
                    values.iter().map(|value| self.text_test(text, value)).collect::<Result<_, _>>()?;
                Ok(Atom::Text(text, tests))
            }
        }
    }

    fn known(&self, axis: Axis, value: &RawValue) -> Result<&'static str, ExpressionError> {
        axis.values().into_iter().find(|name| *name == value.text).ok_or_else(|| {
            let kind = ExpressionErrorKind::UnknownValue { axis, value: value.text.clone() };
            self.error(value.span.clone(), kind)
        })
    }

    fn number_test(&self, axis: Axis, value: &RawValue) -> Result<NumberTest, ExpressionError> {
        let text = value.text.as_str();
        let number = |text: &str| {
            let kind = || ExpressionErrorKind::NotANumber { axis, value: value.text.clone() };
            text.trim().parse::<u64>().map_err(|_| self.error(value.span.clone(), kind()))
        };
        if let Some((low, high)) = text.split_once("..=") {
            let (low, high) = (number(low)?, number(high)?);
            if low > high {
                return Err(self.error(value.span.clone(), ExpressionErrorKind::EmptyRange));
            }
            return Ok(NumberTest::Between(low, high));
        }
        // longer signs first, or `<=4` would read as `<` and `=4`
        type Test = fn(u64) -> NumberTest;
        let signs: [(&str, Test); 7] = [
            ("!=", NumberTest::Not),
            ("<=", NumberTest::AtMost),
            (">=", NumberTest::AtLeast),
            ("==", NumberTest::Is),
            ("<", NumberTest::Below),
            (">", NumberTest::Above),
            ("=", NumberTest::Is),
        ];
        for (sign, test) in signs {
            if let Some(rest) = text.strip_prefix(sign) {
                return number(rest).map(test);
            }
        }
        number(text).map(NumberTest::Is)
    }

    fn text_test(&self, axis: TextAxis, value: &RawValue) -> Result<TextTest, ExpressionError> {
        let text = value.text.clone();
        let is_whole =
            value.mark == Some('=') || (axis != TextAxis::Id && !matches!(value.mark, Some('~' | '/')));
        if is_whole {
            let known = Axis::Text(axis).values();
            if !known.is_empty() && !known.contains(&text.as_str()) {
                let kind = ExpressionErrorKind::UnknownValue { axis: Axis::Text(axis), value: text };
                return Err(self.error(value.span.clone(), kind));
            }
            return Ok(TextTest::Is(text));
        }
        Ok(if value.mark == Some('/') { TextTest::Glob(text) } else { TextTest::Contains(text) })
    }

    /// Takes the first operator that stands here; a word only where it is a whole word.
    fn take_operator(&mut self, operators: &[&str]) -> bool {
        self.skip_blanks();
        for operator in operators {
            let is_word = operator.starts_with(|c: char| c.is_alphabetic());
            if let Some(rest) = self.rest().strip_prefix(operator)
                && !(is_word && rest.starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '-'))
            {
                self.at += operator.len();
                return true;
            }
        }
        false
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn skip_blanks(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn error_here(&self, kind: ExpressionErrorKind) -> ExpressionError {
        let width = self.rest().chars().next().map_or(0, char::len_utf8);
        self.error(self.at..self.at + width, kind)
    }

    fn error(&self, span: Range<usize>, kind: ExpressionErrorKind) -> ExpressionError {
        ExpressionError { expression: self.text.to_owned(), span, kind }
    }
}
