//! Configuration rules: what must be accepted, what must be refused, what must be switched off.

use std::collections::BTreeSet;

use shardcheck_cases::{Body, Case, Family, RuleCase};
use shardcheck_engine::{Answer, Decision, Validation};

use super::Property;
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Halt, Laboratory};

const RULES: &[Family] = &[Family::Rules];
const EXACT: &str = "exact: the decision and the set of features; reasons are not compared word for word";

pub(super) const PROPERTIES: &[Property] = &[
    Property {
        id: "rules.accept",
        statement: "settings that the rule set allows are accepted as asked, with nothing switched off",
        source: "published configuration rules of each engine",
        bugs: &["vllm-ascend#5565", "ATOM#1772", "vllm#28751"],
        tolerance: EXACT,
        families: RULES,
        applies: |case| kind(case) == Some(Kind::Accept),
        check: decide,
    },
    Property {
        id: "rules.reject",
        statement: "settings that the rule set forbids are refused at start, not at the first decode",
        source: "published configuration rules of each engine",
        bugs: &["sglang#33926", "vllm#26574", "vllm-ascend#14876", "vllm#52075"],
        tolerance: EXACT,
        families: RULES,
        applies: |case| kind(case) == Some(Kind::Reject),
        check: decide,
    },
    Property {
        id: "rules.disable",
        statement: "a feature that cannot hold is switched off with a reason, and the rest is accepted",
        source: "published configuration rules of each engine",
        bugs: &["local-inference-lab/vllm#72", "local-inference-lab/vllm#3"],
        tolerance: EXACT,
        families: RULES,
        applies: |case| kind(case) == Some(Kind::Disable),
        check: decide,
    },
    Property {
        id: "rules.warn",
        statement: "settings that hold with a caution are accepted with a warning that names the setting to change, and not refused",
        source: "ATOM: past 128 gathered heads the folded kernel is used with a warning",
        bugs: &[],
        tolerance: "exact: the decision and the settings that are warned of; reasons are not compared word for word",
        families: RULES,
        applies: |case| kind(case) == Some(Kind::Warn),
        check: decide,
    },
];

#[derive(PartialEq, Eq)]
enum Kind {
    Accept,
    Reject,
    Disable,
    Warn,
}

fn rule(case: &Case) -> Option<&RuleCase> {
    match &case.body {
        Body::Rules(rule) => Some(rule),
        _ => None,
    }
}

fn kind(case: &Case) -> Option<Kind> {
    let expected = &rule(case)?.expected;
    Some(match (expected.decision, expected.disabled.is_empty()) {
        (Decision::Reject, _) => Kind::Reject,
        (Decision::Accept, _) if !expected.warnings.is_empty() => Kind::Warn,
        (Decision::Accept, true) => Kind::Accept,
        (Decision::Accept, false) => Kind::Disable,
    })
}

fn features(validation: &Validation) -> BTreeSet<&str> {
    validation.disabled.iter().map(|disabled| disabled.feature.as_str()).collect()
}

fn decide(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let Some(rule) = rule(laboratory.case) else {
        return Err(Halt::Inconclusive("not a rules case".to_owned()));
    };
    if !laboratory.engine.engine.profile().rule_sets.contains(&rule.rules) {
        return Err(Halt::Unsupported(format!("the engine does not answer for the rule set {}", rule.rules)));
    }
    let seen = match laboratory.engine.engine.validate(rule.rules, &rule.settings)? {
        Answer::Done(validation) => validation,
        Answer::Unsupported(why) => return Err(Halt::Unsupported(why)),
    };
    let expected = &rule.expected;
    let asked = serde_json::to_string(&rule.settings).unwrap_or_default();
    if seen.decision != expected.decision {
        let said = if seen.reason.is_empty() { String::new() } else { format!(" ({})", seen.reason) };
        let headline = format!("the settings must be {}, but were {}{said}", word(expected), word(&seen));
        return Err(Failure::because(headline)
            .at(Stage::Configuration)
            .note(format!("settings: {asked}"))
            .into());
    }
    if seen.decision == Decision::Accept && features(&seen) != features(expected) {
        let headline =
            format!("must switch off {:?}, switched off {:?}", features(expected), features(&seen));
        return Err(Failure::because(headline)
            .at(Stage::Configuration)
            .note(format!("settings: {asked}"))
            .into());
    }
    // an engine may warn of more than it must
    let warned = |setting: &str| seen.warnings.iter().any(|warning| warning.setting == setting);
    if let Some(missing) = expected.warnings.iter().find(|warning| !warned(&warning.setting)) {
        return Err(Failure::because(format!("must warn of {}, and does not", missing.setting))
            .at(Stage::Configuration)
            .note(format!("settings: {asked}"))
            .into());
    }
    let silent = seen.disabled.iter().find(|disabled| disabled.reason.is_empty());
    if let Some(disabled) = silent {
        let headline = format!("{} is switched off without a reason", disabled.feature);
        return Err(Failure::because(headline).at(Stage::Configuration).into());
    }
    Ok(Finding::Holds(Measured::exact(1)))
}

fn word(validation: &Validation) -> &'static str {
    match validation.decision {
        Decision::Accept => "accepted",
        Decision::Reject => "refused",
    }
}
