//! Golden lines of the records in `/run/aquifer-setups`.
//! If the golden file changes, the parser must still accept the old lines: a record that an older
//! version has left must be undone.

use aquifer_tests_support::golden;

use super::*;

const NAME: &str = "aquifer-setup-12-345-0";

#[test]
fn golden_steps() {
    let mut golden = golden!("setup");
    let own = |folder: &str| Path::new(folder).join(NAME);
    let steps = [
        SetupStep::Cgroup(own("/sys/fs/cgroup")),
        SetupStep::SwapFile(own("/var/tmp")),
        SetupStep::Zram { number: 3, added: true },
        SetupStep::Zram { number: 4, added: false },
        SetupStep::PageCluster(5),
        SetupStep::Mount(own("/run/aquifer")),
        SetupStep::LoopSwap(7),
    ];
    let text: String = steps.iter().map(|step| step.to_line() + "\n").collect();
    assert_eq!(parse_steps(&text, NAME), Ok(steps.to_vec()));
    golden.lines(&text);
    golden.text("folder", FOLDER);
    golden.text("name, before the process, its start and a number", PREFIX);
    assert_eq!(parse_owner(NAME), Some((12, 345)));
    golden.check();
}
