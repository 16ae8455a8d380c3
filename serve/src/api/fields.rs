//! Typed access to the fields of a JSON request, with errors that name the field.

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of one request. A field that is null counts as absent.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Parses a body that must be a JSON object.
    ///
    /// # Errors
    /// 400 with the place of the mistake.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::new(400, "invalid_json", "the body must be a JSON object".to_string())),
            Err(error) => {
                Err(ApiError::new(400, "invalid_json", format!("the body is not valid JSON: {error}")))
            }
        }
    }

    /// A field, if it is there and not null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A text.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A truth value, false if absent.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        Ok(self.typed(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// An integer between 0 and `maximum`.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub fn count(&self, name: &str, maximum: u64) -> Result<Option<usize>, ApiError> {
        let wanted = format!("an integer from 0 to {maximum}");
        let pick = |value: &Value| value.as_u64().filter(|n| *n <= maximum).map(|n| n as usize);
        self.typed(name, &wanted, pick)
    }

    /// A number between `minimum` and `maximum`.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub fn number(&self, name: &str, minimum: f64, maximum: f64) -> Result<Option<f64>, ApiError> {
        let wanted = format!("a number from {minimum} to {maximum}");
        self.typed(name, &wanted, |value| value.as_f64().filter(|x| (minimum..=maximum).contains(x)))
    }

    /// A text or a list of texts; none if absent.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, ApiError> {
        let list = |values: &Vec<Value>| values.iter().map(|v| v.as_str().map(str::to_string)).collect();
        let pick = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(values) => list(values),
            _ => None,
        };
        Ok(self.typed(name, "a string or a list of strings", pick)?.unwrap_or_default())
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        wanted: &str,
        pick: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        pick(value)
            .map(Some)
            .ok_or_else(|| ApiError::field(name, format!("`{name}` must be {wanted}, not {}", short(value))))
    }
}

/// A value for a message, cut to a length that a person reads.
pub fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).expect("a JSON object")
    }

    #[test]
    fn a_field_of_another_type_is_named_with_what_it_should_be() {
        let fields = fields(r#"{"n": "two", "t": -0.5, "f": 1, "s": [1], "k": 21}"#);
        let message = |error: ApiError| (error.param.expect("a field"), error.message);
        let (param, text) = message(fields.count("n", 9).expect_err("a string"));
        assert_eq!((param.as_str(), text.as_str()), ("n", "`n` must be an integer from 0 to 9, not \"two\""));
        assert!(
            message(fields.number("t", 0.0, 2.0).expect_err("negative")).1.contains("from 0 to 2, not -0.5")
        );
        assert!(message(fields.flag("f").expect_err("a number")).1.contains("true or false"));
        assert!(message(fields.texts("s").expect_err("numbers")).1.contains("list of strings"));
        assert!(message(fields.count("k", 20).expect_err("too large")).1.contains("not 21"));
    }

    #[test]
    fn null_is_absent() {
        let fields = fields(r#"{"a": null}"#);
        assert_eq!(fields.text("a"), Ok(None));
        assert_eq!(fields.flag("a"), Ok(false));
        assert_eq!(fields.texts("a"), Ok(Vec::new()));
    }

    #[test]
    fn a_body_that_is_no_object_is_refused_with_the_place() {
        let error = |text: &str| Fields::parse(text.as_bytes()).expect_err("not an object");
        assert!(error("{\"a\": 1,}").message.contains("line 1 column 9"));
        assert_eq!((error("[1]").status, error("[1]").code), (400, "invalid_json"));
        assert_eq!(error("").code, "invalid_json");
    }
}
