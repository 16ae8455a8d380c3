//! Rule sets as data.

use shardcheck_engine::RuleSetName;

use crate::RuleCase;

/// All rules of a set, in the order of its file.
pub fn rule_set(_set: RuleSetName) -> &'static [RuleCase] {
    &[]
}

/// The rule of that name, if the set has it.
pub fn find(set: RuleSetName, name: &str) -> Option<&'static RuleCase> {
    rule_set(set).iter().find(|rule| rule.rule == name)
}
