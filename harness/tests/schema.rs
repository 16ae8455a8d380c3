//! The schema of the protocol, held against what is really asked.

use serde_json::Value;
use shardcheck_cases::{Body, SuiteName, suite};

const SCHEMA: &str = include_str!("../../docs/protocol.schema.json");

/// What of a value a schema has no place for; none where it fits. Looks at what the schemas of operations use: references, one of several,
/// objects, constants and enumerations.
fn misfit(root: &Value, schema: &Value, value: &Value, path: &str) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let known = root.pointer(reference.trim_start_matches('#')).expect("a reference has its definition");
        return misfit(root, known, value, path);
    }
    if let Some(several) = schema["oneOf"].as_array() {
        let misfits: Vec<String> = several.iter().map_while(|one| misfit(root, one, value, path)).collect();
        // what came nearest is what lies deepest
        return (misfits.len() == several.len())
            .then(|| misfits.into_iter().max_by_key(|text| text.matches('/').count()).unwrap_or_default());
    }
    if let Some(constant) = schema.get("const").filter(|constant| *constant != value) {
        return Some(format!("{path}: {value} is not {constant}"));
    }
    if let Some(known) = schema["enum"].as_array().filter(|known| !known.contains(value)) {
        return Some(format!("{path}: {value} is none of {known:?}"));
    }
    let (Some(properties), Some(fields)) = (schema["properties"].as_object(), value.as_object()) else {
        return None;
    };
    let missing = schema["required"].as_array().into_iter().flatten();
    if let Some(name) = missing.filter_map(Value::as_str).find(|name| !fields.contains_key(*name)) {
        return Some(format!("{path}: {name} is missing"));
    }
    fields.iter().find_map(|(name, field)| match properties.get(name) {
        Some(own) => misfit(root, own, field, &format!("{path}/{name}")),
        None if schema["additionalProperties"] == false => Some(format!("{path}: {name} has no place")),
        None => None,
    })
}

#[test]
fn every_operation_of_a_stack_or_a_layer_of_experts_has_its_place_in_the_schema() {
    let root: Value = serde_json::from_str(SCHEMA).unwrap();
    let schema = &root["$defs"]["operation"];
    let mut checked = 0;
    for case in suite(SuiteName::Nightly, 1).into_iter().chain(suite(SuiteName::Gate, 1)) {
        let operation = match &case.body {
            Body::Stack(stack) => stack.operation(),
            Body::Moe(layer) => layer.operation(),
            Body::Route(router) => router.operation(),
            Body::Kda(steps) => steps.operation(),
            Body::Pcp(batch) => batch.operation(3),
            _ => continue,
        };
        let value = serde_json::to_value(&operation).unwrap();
        assert_eq!(misfit(&root, schema, &value, ""), None, "{}: {value}", case.id());
        checked += 1;
    }
    assert!(checked > 500, "{checked}");
}

#[test]
fn a_field_that_the_schema_does_not_have_is_told_with_its_place() {
    let root: Value = serde_json::from_str(SCHEMA).unwrap();
    let plan = serde_json::json!({ "layers": 2, "stream": "whole", "pcp": { "world": 2, "strategy": "zigzag", "decodes": "replicated", "many": 1 } });
    let operation = serde_json::json!({ "operation": "forward", "plan": plan });
    let told = misfit(&root, &root["$defs"]["operation"], &operation, "").unwrap();
    assert_eq!(told, "/plan/pcp: many has no place");
}
