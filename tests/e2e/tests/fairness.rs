//! A program that asks for as many pages as it can beside one that asks for few: in the same agent, from the same memory nodes.

use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};

/// Limits tell the runs from each other.
const GREEDY: &str = "12M";
const MODEST: &str = "10M";
/// The greedy one's threads wait for pages all the time, the modest one's only thread does something between.
const SHARE_MIN: u64 = 8;

fn faults(cluster: &Cluster, limit: &str) -> Option<u64> {
    let mib: u64 = limit.trim_end_matches('M').parse().expect("MiB");
    let status = status(cluster.agent_socket())?;
    let run = status["runs"].as_array()?.iter().find(|run| run["limit_bytes"] == mib << 20)?;
    run["faults"].as_u64()
}

fn check(fabric: &str) {
    let cluster = Cluster::up_with(2, "256M", &["--fabric", fabric]);
    let checker = build::programs().join("checker");
    let checker = checker.to_str().expect("a plain path");
    let start = |limit: &str, options: &[&str]| {
        let program: Vec<&str> = [checker, "pages"].iter().chain(options).copied().collect();
        Running::start(&mut cluster.run_command(limit, &program), false, Box::new(|| 0))
    };
    let greedy = start(GREEDY, &["--bytes", "96M", "--threads", "8", "--rounds", "1000000"]);
    let before = eventually("the greedy program to fault", || {
        faults(&cluster, GREEDY).filter(|faults| *faults > 10_000)
    });
    let mut modest = start(MODEST, &["--bytes", "32M", "--threads", "1", "--rounds", "8"]);
    // The last that was seen of both before the modest one ended.
    let (mut of_modest, mut of_greedy) = (0, before);
    while !modest.has_ended() {
        if let (Some(few), Some(many)) = (faults(&cluster, MODEST), faults(&cluster, GREEDY)) {
            (of_modest, of_greedy) = (few, many);
        }
        std::thread::yield_now();
    }
    modest.wait().assert_success("the modest program");
    let program = eventually("the greedy program", || processes::descendants(greedy.pid()).first().copied());
    processes::kill(program);
    let outcome = greedy.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    let others = of_greedy - before;
    println!("over {fabric}: {of_modest} faults of the modest program, {others} of the greedy one meanwhile");
    assert!(of_modest * SHARE_MIN >= others, "{of_modest} of {others} faults");
    cluster.assert_all_free();
}

#[test]
fn a_greedy_program_leaves_a_modest_one_its_share() {
    check("shm");
}

#[test]
fn a_greedy_program_leaves_a_modest_one_its_share_over_tcp() {
    check("tcp");
}
