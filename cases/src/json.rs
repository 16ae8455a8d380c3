//! JSON read strictly: no key twice, and an object wherever one stands.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
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

/// The first list in `given` that stands for an object: `canonical` is the same value as this program writes it.
pub(crate) fn list_for_object(given: &Value, canonical: &Value) -> Option<String> {
    fn find(given: &Value, canonical: &Value, place: &str) -> Option<String> {
        match (given, canonical) {
            (Value::Array(_), Value::Object(_)) => Some(place.to_owned()),
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
    fn a_list_that_stands_for_an_object_is_found_and_no_other() {
        let canonical = json!({"a": {"b": [1, {"c": 2}]}, "d": [3]});
        assert_eq!(list_for_object(&canonical, &canonical), None);
        assert_eq!(list_for_object(&json!({"a": [[1, [2]]], "d": [3]}), &canonical), Some("a".into()));
        assert_eq!(list_for_object(&json!({"a": {"b": [1, [2]]}}), &canonical), Some("a.b[1]".into()));
        assert_eq!(list_for_object(&json!([{}, [3]]), &canonical), Some(String::new()));
    }
}
