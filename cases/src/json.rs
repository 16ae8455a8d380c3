//! JSON read strictly: no key twice, and an object wherever one stands.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeOwned, DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The value of a text in which no object has a key twice.
///
/// # Errors
/// What does not parse, or the key that stands twice and where.
pub fn read_json(text: &str) -> Result<Value, String> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Strict { place: "" }.deserialize(&mut reader).map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// Reads a value as a type of this program.
///
/// # Errors
/// The place of what is wrong, what stands there and what should, in words of JSON and not of this program's types.
pub fn read_as<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let place = error.path().to_string();
        let mut place = place.trim_end_matches(['?', '.']);
        let reason = in_words(&error.inner().to_string());
        if let Some(key) = reason.strip_prefix("unknown key `").and_then(|rest| rest.split('`').next()) {
            // the place is where the key stands
            place = place.strip_suffix(key).unwrap_or(place).trim_end_matches('.');
        }
        if place.is_empty() { reason } else { format!("`{place}`: {reason}") }
    })
}

/// What serde says, without the names of types.
fn in_words(message: &str) -> String {
    if let Some((found, expected)) =
        message.strip_prefix("invalid ").and_then(|rest| rest.split_once(", expected "))
    {
        // "type: map", "value: integer `-1`", "length 2"
        let found = found.split_once(": ").map_or(found, |(_, found)| found);
        let found = match found {
            "map" => "an object",
            "sequence" => "a list",
            "unit variant" => "a name alone",
            other => other,
        };
        let found = found.replace("floating point ", "number ").replace("length ", "a list of ");
        return format!("{found} stands there, and {} is expected", expected_in_words(expected));
    }
    message.replace("unknown variant", "unknown name").replace("field `", "key `")
}

fn expected_in_words(expected: &str) -> &str {
    match expected {
        "u64" | "usize" => "a whole number from 0 to 18446744073709551615",
        "u32" => "a whole number from 0 to 4294967295",
        "u8" => "a whole number from 0 to 255",
        "f32" | "f64" => "a number",
        "a string" | "a borrowed string" => "a text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "unit" | "unit variant" => "the name alone, as a text,",
        "a map" => "an object",
        "string or map" => "a name, or an object of one,",
        "map with a single key" => "an object with a single key",
        _ if expected.starts_with("struct ")
            || expected.contains("variant")
            || expected.contains("tagged") =>
        {
            "an object"
        }
        _ if expected.starts_with("enum ") => "a name, or an object of one,",
        other => other,
    }
}

/// The first place where `given` has another kind of value than `canonical`, which is the same value as this program writes it, and what
/// stands there: a list of an object's values, an object around a name.
pub(crate) fn other_kind(given: &Value, canonical: &Value) -> Option<(String, String)> {
    fn find(given: &Value, canonical: &Value, place: &str) -> Option<(String, String)> {
        match (given, canonical) {
            (Value::Array(_), Value::Object(_)) => Some((
                place.to_owned(),
                "is a list, and an object stands there: give its values their keys".to_owned(),
            )),
            (Value::Object(_), Value::String(name)) => {
                Some((place.to_owned(), format!("is an object, and a name stands there: write {name:?}")))
            }
            (Value::Object(given), Value::Object(canonical)) => given
                .iter()
                .filter_map(|(key, value)| Some((key, value, canonical.get(key)?)))
                .find_map(|(key, value, canonical)| find(value, canonical, &below(place, key))),
            (Value::Array(given), Value::Array(canonical)) => {
                let pairs = given.iter().zip(canonical).enumerate();
                pairs.into_iter().find_map(|(index, (given, canonical))| {
                    find(given, canonical, &format!("{place}[{index}]"))
                })
            }
            _ => None,
        }
    }
    find(given, canonical, "")
}

fn below(place: &str, key: &str) -> String {
    if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") }
}

/// Reads a value whose objects have each key once.
struct Strict<'a> {
    /// Where the value stands, for what is said of it; empty for the whole.
    place: &'a str,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        loop {
            let place = format!("{}[{}]", self.place, values.len());
            match list.next_element_seed(Strict { place: &place })? {
                Some(value) => values.push(value),
                None => return Ok(Value::Array(values)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let (mut values, mut keys) = (Map::new(), BTreeSet::new());
        while let Some(key) = object.next_key::<String>()? {
            let place = below(self.place, &key);
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format!(
                    "the key `{place}` stands twice: leave one of them out"
                )));
            }
            values.insert(key, object.next_value_seed(Strict { place: &place })?);
        }
        Ok(Value::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Family;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Own {
        #[serde(rename = "name")]
        _name: String,
        #[serde(rename = "count")]
        _count: usize,
        #[serde(rename = "of")]
        _of: Family,
    }

    #[test]
    fn what_has_each_key_once_reads_as_ever() {
        for text in [
            r#"{"a": [1, -2, 0.1, 1e300, 18446744073709551615], "b": {"a": null, "c": "ü\n"}, "d": true}"#,
            "[]",
            "\"x\"",
        ] {
            assert_eq!(read_json(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        }
        for text in ["{", "1 2", "", r#"{"a" 1}"#] {
            assert!(read_json(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_told_with_its_place() {
        for (text, place) in [
            (r#"{"a": 1, "a": 1}"#, "`a`"),
            (r#"{"a": {"b": 1, "c": 2, "b": 3}}"#, "`a.b`"),
            (r#"{"a": [0, {"b": 1, "b": 2}]}"#, "`a[1].b`"),
        ] {
            let error = read_json(text).unwrap_err();
            assert!(error.contains(place) && error.contains("twice"), "{error}");
        }
    }

    #[test]
    fn a_list_for_an_object_and_an_object_for_a_name_are_found_and_no_others() {
        let canonical = json!({"a": {"b": [1, {"c": 2}]}, "d": [3], "e": "f"});
        let place = |given: Value| other_kind(&given, &canonical).map(|(place, _)| place);
        assert_eq!(place(canonical.clone()), None);
        assert_eq!(place(json!({"a": [[1, [2]]], "d": [3]})), Some("a".into()));
        assert_eq!(place(json!({"a": {"b": [1, [2]]}})), Some("a.b[1]".into()));
        assert_eq!(place(json!([{}, [3]])), Some(String::new()));
        assert_eq!(place(json!({"e": {"f": null}})), Some("e".into()));
        assert!(other_kind(&json!({"e": {"f": null}}), &canonical).unwrap().1.ends_with("write \"f\""));
    }

    #[test]
    fn what_is_no_value_of_a_type_is_told_with_its_place_and_without_the_type() {
        for (value, told) in [
            (
                json!({"name": 1, "count": 1, "of": "verify"}),
                "`name`: integer `1` stands there, and a text is expected",
            ),
            (
                json!({"name": "", "count": -1, "of": "verify"}),
                "`count`: integer `-1` stands there, and a whole number from 0 to",
            ),
            (json!({"name": "", "count": [], "of": "verify"}), "`count`: a list stands there"),
            (json!({"name": "", "count": 1, "of": 7}), "`of`: integer `7` stands there, and a name, or"),
            (json!({"name": "", "count": 1, "of": {}}), "`of`: "),
            (json!({"name": "", "count": 1, "of": "x"}), "`of`: unknown name `x`, expected one of `layout`"),
            (json!({"name": "", "count": 1}), "missing key `of`"),
            (json!({"more": 1}), "unknown key `more`, expected one of `name`"),
            (json!(7), "integer `7` stands there, and an object is expected"),
        ] {
            let error = read_as::<Own>(value.clone()).unwrap_err();
            assert!(error.contains(told), "{value}: {error}");
        }
    }
}
