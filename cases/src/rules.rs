//! Rule sets as data: launch settings and what their owner must say to them, from `rules/*.toml`.

use std::sync::LazyLock;

use serde::Deserialize;
use shardcheck_engine::{Decision, RuleSetName, Settings, Validation};

use crate::RuleCase;

const FILES: [&str; 6] = [
    include_str!("../rules/own.toml"),
    include_str!("../rules/atom.toml"),
    include_str!("../rules/atom_next.toml"),
    include_str!("../rules/vllm.toml"),
    include_str!("../rules/vllm_next.toml"),
    include_str!("../rules/vllm_ascend.toml"),
];

static RULES: LazyLock<Vec<Vec<RuleCase>>> = LazyLock::new(|| FILES.map(read).into());
static SETTINGS: LazyLock<Vec<SettingMeaning>> = LazyLock::new(|| {
    let file: SettingsFile = toml::from_str(include_str!("../rules/settings.toml"))
        .unwrap_or_else(|error| panic!("rules/settings.toml is not well formed: {error}"));
    file.setting
});

/// A name that rule cases use, and what it means.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingMeaning {
    /// Name in [`Settings`] and in the features of a [`Validation`].
    pub name: String,
    /// What it says, and what holds when it is absent.
    pub meaning: String,
}

/// All rules of a set, in the order of its file.
pub fn rule_set(set: RuleSetName) -> &'static [RuleCase] {
    RULES.iter().find(|rules| rules[0].rules == set).map_or(&[], Vec::as_slice)
}

/// The rule of that name, if the set has it.
pub fn find(set: RuleSetName, name: &str) -> Option<&'static RuleCase> {
    rule_set(set).iter().find(|rule| rule.rule == name)
}

/// Every name that the rules use.
pub fn setting_meanings() -> &'static [SettingMeaning] {
    &SETTINGS
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsFile {
    setting: Vec<SettingMeaning>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesFile {
    set: RuleSetName,
    rule: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    name: String,
    why: String,
    settings: Settings,
    decision: Decision,
    #[serde(default)]
    disabled: Vec<String>,
    #[serde(default)]
    warned: Vec<String>,
}

fn read(text: &str) -> Vec<RuleCase> {
    let file: RulesFile =
        toml::from_str(text).unwrap_or_else(|error| panic!("a rules file is not well formed: {error}"));
    let case = |rule: Rule| {
        let expected = match rule.decision {
            Decision::Reject => Validation::reject(rule.why),
            Decision::Accept => {
                let disabling = |validation: Validation, feature: &String| {
                    validation.disabling(feature, rule.why.clone())
                };
                let warning =
                    |validation: Validation, setting: &String| validation.warning(setting, rule.why.clone());
                let taken = rule.disabled.iter().fold(Validation::accept(), disabling);
                rule.warned.iter().fold(taken, warning)
            }
        };
        RuleCase { rule: rule.name, rules: file.set, settings: rule.settings, expected }
    };
    file.rule.into_iter().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = &'static RuleCase> {
        RuleSetName::ALL.into_iter().flat_map(rule_set)
    }

    #[test]
    fn every_rule_set_has_rules_with_unique_names() {
        for set in RuleSetName::ALL {
            let mut names: Vec<_> = rule_set(set).iter().map(|rule| &rule.rule).collect();
            assert!(names.len() >= 15, "{set} has {} rules", names.len());
            let count = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count, "{set} names a rule twice");
            assert!(rule_set(set).iter().all(|rule| rule.rules == set));
        }
    }

    #[test]
    fn every_rule_set_accepts_something_and_rejects_something() {
        for set in RuleSetName::ALL {
            for decision in [Decision::Accept, Decision::Reject] {
                assert!(
                    rule_set(set).iter().any(|rule| rule.expected.decision == decision),
                    "{set} {decision:?}"
                );
            }
        }
    }

    #[test]
    fn every_name_in_a_rule_is_explained() {
        let known = |name: &str| setting_meanings().iter().any(|setting| setting.name == name);
        for rule in all() {
            for name in rule.settings.0.keys() {
                assert!(known(name), "{}/{} sets {name}", rule.rules, rule.rule);
            }
            for disabled in &rule.expected.disabled {
                assert!(
                    known(&disabled.feature),
                    "{}/{} disables {}",
                    rule.rules,
                    rule.rule,
                    disabled.feature
                );
            }
            for warning in &rule.expected.warnings {
                assert!(known(&warning.setting), "{}/{} warns of {}", rule.rules, rule.rule, warning.setting);
            }
        }
    }

    #[test]
    fn every_explained_name_is_used_by_a_rule() {
        for setting in setting_meanings() {
            let used = all().any(|rule| {
                rule.settings.get(&setting.name).is_some()
                    || rule.expected.disabled.iter().any(|disabled| disabled.feature == setting.name)
            });
            assert!(
                used || setting.name == "query_len" || setting.name == "attention",
                "{} is not used",
                setting.name
            );
        }
    }

    #[test]
    fn every_feature_that_can_be_switched_off_is_in_some_rule() {
        for feature in [
            "enable_query_replication",
            "enable_project_before_merge",
            "enable_tbo",
            "tbo_token_split",
            "cp_kv_cache_interleave_size",
            "draft_query_slots",
        ] {
            assert!(
                all().any(|rule| rule.expected.disabled.iter().any(|disabled| disabled.feature == feature)),
                "{feature}"
            );
        }
    }

    #[test]
    fn the_two_revisions_of_atom_differ_where_speculation_meets_replication() {
        let features = |set: RuleSetName| -> Vec<String> {
            find(set, "mtp_of_3")
                .unwrap()
                .expected
                .disabled
                .iter()
                .map(|disabled| disabled.feature.clone())
                .collect()
        };
        assert_eq!(features(RuleSetName::Atom), ["enable_query_replication"]);
        assert!(features(RuleSetName::AtomNext).is_empty());
    }

    #[test]
    fn values_keep_their_json_type_so_that_coercion_is_the_engines_business() {
        let rule = find(RuleSetName::Atom, "the_string_false_is_true").unwrap();
        let config = rule.settings.get("dcp_config").unwrap();
        assert_eq!(config["enable_query_replication"], serde_json::json!("false"));
        assert_eq!(
            find(RuleSetName::Atom, "zero_is_false").unwrap().settings.get("dcp_config").unwrap()["enable_query_replication"],
            0
        );
    }
}
