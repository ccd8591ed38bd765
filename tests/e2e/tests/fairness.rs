//! A program with as many page faults as possible beside one with few, on the same agent and nodes.
//!
//! The division of faults depends on the machine's scheduler; benches measure it. The division of
//! the mempool is tested in `aquifer_pager`.

use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};

const GREEDY: &str = "12M";
const MODEST: &str = "10M";

fn faults(cluster: &Cluster) -> Option<u64> {
    status(cluster.agent_socket())?["runs"].as_array()?.first()?["faults"].as_u64()
}

fn check(fabric: &str) {
    let cluster = Cluster::up_with(2, "256M", &["--fabric", fabric]);
    let checker = build::programs().join("checker");
    let checker = checker.to_str().expect("a plain path");
    let start = |limit: &str, options: &[&str]| {
        let program: Vec<&str> = [checker, "pages"].iter().chain(options).copied().collect();
        Running::start(&mut cluster.run_command(limit, &program), false, Box::new(|| 0))
    };
    let mut greedy = start(GREEDY, &["--bytes", "96M", "--threads", "8", "--rounds", "1000000"]);
    eventually("the greedy program to fault", || faults(&cluster).filter(|faults| *faults > 10_000));
    let modest = start(MODEST, &["--bytes", "32M", "--threads", "1", "--rounds", "2"]);
    modest.wait().assert_success("the modest program");
    assert!(!greedy.has_ended(), "the greedy program was there all the time");
    let program = eventually("the greedy program", || processes::descendants(greedy.pid()).first().copied());
    processes::kill(program);
    let outcome = greedy.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    cluster.assert_all_free();
}

#[test]
fn a_modest_program_finishes_beside_a_greedy_one() {
    check("shm");
}

mod long {
    #[test]
    fn a_modest_program_finishes_beside_a_greedy_one_over_tcp() {
        super::check("tcp");
    }
}
