//! The agent is killed, again and again, under programs that check every byte of their own memory.
//! They wait, and go on.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{await_time, figure, restart_agent, start_missing};
use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};

/// The checker's memory and its limit: a quarter.
const BYTES: &str = "128M";
const LIMIT: &str = "34M";
/// Enough to meet the agent in the middle of many things; each takes a moment.
const RESTARTS_MAX: usize = 8;
/// Faults that an agent serves before it is killed.
const FAULTS: u64 = 300;

/// Run the checker while agents die under it, and compare with a plain run.
fn check(fabric: &str, test: &str, options: &[&str]) {
    let checker = build::programs().join("checker");
    let mut program = vec![checker.to_str().expect("a plain path"), test, "--bytes", BYTES];
    program.extend(options);
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let cluster = Cluster::up_with(2, "512M", &["--fabric", fabric]);
    let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), true, Box::new(|| 0));
    let mut restarts = 0;
    while restarts < RESTARTS_MAX {
        let wanted = FAULTS * (1 + restarts as u64 % 4);
        let goes_on = await_time(&mut run, "faults to be served", || {
            figure(&cluster, "faults").is_some_and(|faults| faults >= wanted)
        });
        if !goes_on {
            break;
        }
        restart_agent(&cluster);
        restarts += 1;
    }
    let outcome = run.wait();
    outcome.assert_success("the run whose agents died");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    assert!(restarts > 0, "no agent died");
    println!("{test} over {fabric}: {restarts} agents died");
    cluster.assert_all_free();
}

macro_rules! checks {
    ($($name:ident: $fabric:literal $test:literal $options:expr;)*) => {
        $(
            #[test]
            fn $name() {
                check($fabric, $test, &$options);
            }
        )*
    };
}

checks! {
    pages_outlive_their_agent: "shm" "pages" ["--rounds", "3"];
    pages_outlive_their_agent_over_tcp: "tcp" "pages" ["--rounds", "3"];
    forks_outlive_their_agent: "shm" "fork" [];
    moved_pages_outlive_their_agent: "shm" "mremap" [];
    pages_given_up_stay_given_up: "shm" "madvise" [];
    threads_outlive_their_agent: "shm" "threads" [];
    the_heap_outlives_its_agent: "shm" "brk" ["--bytes", "512M"];
}

#[test]
fn a_program_that_comes_while_the_agent_is_away_waits_for_the_next() {
    let cluster = Cluster::up(2, "256M");
    processes::kill(cluster.daemon("agent", None));
    let run = Running::start(&mut cluster.run_command("64M", &["echo", "here"]), false, Box::new(|| 0));
    eventually("aquifer run to be there", || processes::is_alive(run.pid()).then_some(()));
    start_missing(&cluster, "Started agent");
    let outcome = run.wait();
    outcome.assert_success("the run that came too early");
    assert_eq!(outcome.stdout, b"here\n");
    cluster.assert_all_free();
}
