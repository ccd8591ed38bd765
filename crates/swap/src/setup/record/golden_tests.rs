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
        Step::Cgroup(own("/sys/fs/cgroup")),
        Step::SwapFile(own("/var/tmp")),
        Step::Zram { number: 3, added: true },
        Step::Zram { number: 4, added: false },
        Step::PageCluster(5),
        Step::Mount(own("/run/aquifer")),
        Step::LoopSwap(7),
    ];
    let text: String = steps.iter().map(|step| step.to_line() + "\n").collect();
    assert_eq!(parse_steps(&text, NAME), Ok(steps.to_vec()));
    golden.lines(&text);
    golden.text("folder", FOLDER);
    golden.text("name, before the process, its start and a number", PREFIX);
    assert_eq!(parse_owner(NAME), Some((12, 345)));
    golden.check();
}
