//! The rules of the code base, and tests of the readers that they use.

mod documents;
mod language;
mod readers;
mod rules;
mod unfinished;
mod unsafe_code;

/// Fails with the rule and its violations, if there are any.
#[track_caller]
fn assert_no_violations(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}\n  {}", violations.join("\n  "));
}
