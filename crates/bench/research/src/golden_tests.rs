//! Golden names: the command line. A changed golden file needs a line in CHANGELOG: users' scripts
//! depend on these.

use aquifer_tests_support::golden;
use clap::CommandFactory;

use crate::ResearchArgs;

#[test]
fn golden_command_line() {
    let mut golden = golden!("command-line");
    golden.command_line(&ResearchArgs::command(), "");
    golden.check();
}
