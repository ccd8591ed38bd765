//! A run with millions of pages.

use std::time::Duration;

use aquifer_tests_e2e::cluster::find;
use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;

const GIB: u64 = 1 << 30;

mod long {
    use super::*;

    /// Two replicas of 7 GiB on four nodes of 5 GiB. After the death of a node, the others have
    /// room for both replicas of all pages.
    #[test]
    fn eight_gib_in_one_with_two_copies_survive_a_node() {
        let mut cluster = Cluster::up_with(4, "5G", &["--mempool", "512M"]);
        cluster.set_run_options(&["--replicas", "2"]);
        let checker = build::programs().join("checker");
        let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "8G", "--rounds", "1"];
        let run = Running::start(&mut cluster.run_command("1G", &program), false, Box::new(|| 0));
        eventually("most of it to be on the nodes", || {
            let status = status(cluster.agent_socket())?;
            (find(&status, "remote_bytes")?.as_u64()? >= 10 * GIB).then_some(())
        });
        processes::signal(cluster.daemon("node", Some(2)), Signal::KILL);
        run.wait_for(Duration::from_secs(1500)).assert_success("the checker of 8 GiB");
    }
}
