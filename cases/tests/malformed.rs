//! Cases that are none: every id and every JSON of a case with one thing wrong, in every family.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use shardcheck_cases::{Case, Family, SuiteName, suite};

/// Stacks with all that their ids may say.
const STACKS: [&str; 3] = [
    "stack/l3.h24.i20.v37.sharded.e6.k2.d1.pcp2.head_tail.owned/tiny-mla/tp4.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/x/v0+9,1+3.pad2_d0,1/7",
    "stack/l2.h40.i9.v8.whole.wired.m3.r2.pcp2.head_tail.replicated/tiny-mla/mla24+8v12.tp2.dcp2.h1.s1.b2.n40.bf16.ag_rs/drafts/v0+5,1+6/7",
    "stack/l4.h24.i20.v37.sharded.e6.k2.d1.y1.j7.z10.biased.kksm.qh4.vh8.qd6.vd5.t4.c4.u3.softplus.x4.packed.situ.gated/tiny-mla/tp4.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/x/v0+9_d0/7",
];

/// What stands in no message: names of this program's types, and of those of its language.
const OF_THE_PROGRAM: [&str; 15] = [
    "struct",
    "enum ",
    "variant",
    "usize",
    "u64",
    "u32",
    "expected i",
    "expected f",
    "tuple",
    "newtype",
    "::",
    "Option",
    "Vec<",
    "Mla {",
    "Gqa {",
];

/// Cases of each family: short ones, and long ones.
fn cases() -> Vec<Case> {
    let mut of_family: BTreeMap<&str, Vec<Case>> = BTreeMap::new();
    for case in suite(SuiteName::Gate, 1) {
        of_family.entry(case.family.name()).or_default().push(case);
    }
    let mut picked: Vec<Case> =
        STACKS.iter().map(|id| id.parse().unwrap_or_else(|e| panic!("{e}"))).collect();
    for cases in of_family.values_mut() {
        cases.sort_by_key(|case| case.id().len());
        let count = cases.len();
        picked.extend([0, count / 2].map(|index| cases[index].clone()));
    }
    picked
}

/// What is wrong with a message; nothing, most of the time.
fn fault_of(message: &str) -> Option<&'static str> {
    if let Some(word) = OF_THE_PROGRAM.into_iter().find(|word| message.contains(word)) {
        return Some(word);
    }
    (message.matches("case is out of range").count() > 1).then_some("a doubled beginning")
}

/// The id with every number, every word and every part replaced by something else.
fn other_ids(id: &str) -> BTreeSet<String> {
    let mut others = BTreeSet::new();
    let mut put = |from: usize, to: usize, text: &str| {
        others.insert(format!("{}{text}{}", &id[..from], &id[to..]));
    };
    let runs = |wanted: fn(char) -> bool| {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (at, c) in id.char_indices() {
            match runs.last_mut() {
                Some((_, end)) if wanted(c) && *end == at => *end += c.len_utf8(),
                _ if wanted(c) => runs.push((at, at + c.len_utf8())),
                _ => {}
            }
        }
        runs
    };
    for (from, to) in runs(|c| c.is_ascii_digit()) {
        let own = &id[from..to];
        for text in [
            "",
            "0",
            "99999999999999999999",
            "18446744073709551615",
            "9223372036854775807",
            "999999",
            "-1",
            "x",
            "1e3",
            "1.5",
            "NaN",
        ] {
            put(from, to, text);
        }
        put(from, to, &format!("0{own}"));
        put(from, to, &format!("+{own}"));
    }
    for wanted in [(|c| !"/._".contains(c)) as fn(char) -> bool, |c| c != '/'] {
        for (from, to) in runs(wanted) {
            let own = &id[from..to];
            for text in [
                "".to_owned(),
                format!("{own}.{own}"),
                format!("{own}zz"),
                format!("é{own}"),
                own.to_uppercase(),
                format!("{own}/{own}"),
                format!(" {own}"),
            ] {
                put(from, to, &text);
            }
        }
    }
    others.remove(id);
    others
}

/// Places of a value, each with what stands there; three of a list.
fn places(value: &Value, at: &str, into: &mut Vec<String>) {
    into.push(at.to_owned());
    match value {
        Value::Object(own) => own.iter().for_each(|(key, value)| places(value, &format!("{at}/{key}"), into)),
        Value::Array(own) => {
            own.iter()
                .take(3)
                .enumerate()
                .for_each(|(index, value)| places(value, &format!("{at}/{index}"), into));
        }
        _ => {}
    }
}

/// The case with every value replaced by another, left out, or with one more beside it.
fn other_values(case: &Case) -> Vec<(String, Value)> {
    let whole: Value = serde_json::from_str(&case.to_json()).unwrap();
    let mut all = Vec::new();
    places(&whole, "", &mut all);
    let mut others = Vec::new();
    for place in all {
        let own = whole.pointer(&place).unwrap().clone();
        let mut put = |value: Value| {
            let mut other = whole.clone();
            *other.pointer_mut(&place).unwrap() = value;
            others.push((place.clone(), other));
        };
        for value in [
            json!(null),
            json!(true),
            json!(-1),
            json!(0),
            json!(1.5),
            json!("x"),
            json!(""),
            json!([]),
            json!({}),
            json!([1]),
            json!({"a": 1}),
            json!(u64::MAX),
            json!(1u64 << 53),
            json!(u32::MAX),
            json!(1e30),
            json!(1e308),
            json!(1e-308),
        ] {
            if value != own {
                put(value);
            }
        }
        if let Value::String(name) = &own {
            put(json!({name: null}));
            put(json!([name]));
            put(json!(name.to_uppercase()));
        }
        if let Value::Object(keys) = &own {
            for key in keys.keys() {
                let mut less = keys.clone();
                less.remove(key);
                put(less.into());
            }
            let mut more = keys.clone();
            more.insert("more".to_owned(), json!(1));
            put(more.into());
            put(keys.values().cloned().collect());
        }
    }
    others
}

#[test]
fn an_id_with_one_thing_wrong_is_refused_in_words_or_is_the_id_of_another_case() {
    let mut wrong = Vec::new();
    for case in cases() {
        let id = case.id();
        for other in other_ids(&id) {
            match std::panic::catch_unwind(|| other.parse::<Case>()) {
                Err(_) => wrong.push(format!("{other}: a panic")),
                Ok(Ok(read)) if without_blocks(&read.id()) != without_blocks(&other) => {
                    wrong.push(format!("{other}: reads as {}", read.id()));
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    let message = error.to_string();
                    wrong.extend(fault_of(&message).map(|why| format!("{other}: {why}: {message}")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} ids:\n{}", wrong.len(), wrong.join("\n"));
}

/// The id without the number of blocks, which may be left out.
fn without_blocks(id: &str) -> String {
    let is_blocks = |token: &&str| token.strip_prefix('n').is_some_and(|n| n.parse::<usize>().is_ok());
    let part = |part: &str| part.split('.').filter(|token| !is_blocks(token)).collect::<Vec<_>>().join(".");
    id.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[test]
fn a_json_with_one_thing_wrong_is_refused_in_words_or_is_the_json_of_another_case() {
    let mut wrong = Vec::new();
    for case in cases() {
        for (place, other) in other_values(&case) {
            let text = other.to_string();
            match std::panic::catch_unwind(|| Case::from_json(&text)) {
                Err(_) => wrong.push(format!("{} {place}: a panic: {text}", case.family)),
                // a rule is found by its name, whatever its settings
                Ok(Ok(read)) if read.family == Family::Rules => {}
                Ok(Ok(read)) => {
                    let id = read.id();
                    match std::panic::catch_unwind(|| id.parse::<Case>()) {
                        Ok(Ok(again)) if again == read => {}
                        other => wrong.push(format!("{place}: its id is another case: {id}: {other:?}")),
                    }
                }
                Ok(Err(error)) => {
                    let message = error.to_string();
                    wrong.extend(
                        fault_of(&message).map(|why| format!("{} {place}: {why}: {message}", case.family)),
                    );
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} values:\n{}", wrong.len(), wrong.join("\n"));
}
