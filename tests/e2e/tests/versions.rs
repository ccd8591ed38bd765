//! The last release and this build side by side: each part is replaced by that of the other
//! version, while a program runs and forks.

use std::path::Path;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{figure, start_missing};
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;

/// The parts that are replaced, and what `aquifer up` says when it has started each.
const PARTS: [(&str, Option<usize>, &str); 4] = [
    ("agent", None, "Started agent"),
    ("keeper", None, "Started keeper"),
    ("node", Some(1), "Started node-1"),
    ("node", Some(2), "Started node-2"),
];

/// A program that forks, is paged, and checks all its memory until it is killed.
fn endless(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program =
        [checker.to_str().expect("a plain path"), "by-fork", "--bytes", "32M", "--rounds", "1000000"];
    Running::start(&mut cluster.run_command("16M", &program), false, Box::new(|| 0))
}

/// Pages leave and come back, and children are served.
fn await_progress(cluster: &Cluster, programs: &mut [Running]) {
    let so_far = || Some((figure(cluster, "faults")?, figure(cluster, "evictions")?));
    let (faults, evictions) = eventually("the agent to answer", so_far);
    eventually("the programs to be paged", || {
        assert!(!programs.iter_mut().any(Running::has_ended), "a program has ended");
        let now = so_far()?;
        // The counters of an agent begin with 0.
        (now.0 > faults + 2000 && now.1 > evictions + 2000).then_some(())
    });
}

/// Runs a program to its end, and shows the status.
fn use_cluster(cluster: &Cluster) {
    let checker = build::programs().join("checker");
    let output = cluster.run("16M", &[checker.to_str().expect("a plain path"), "fork", "--bytes", "32M"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = cluster.command().arg("status").output().expect("aquifer can be started");
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

/// Starts a cluster by one version, and replaces its parts by those of another one, and back.
fn replace_parts(first: &Path, second: &Path) {
    let mut cluster = Cluster::up_by(first, 2, "256M", &["--keep-memory"]);
    suspend_supervisor(&cluster);
    let mut programs = vec![endless(&cluster)];
    for binary in [second, first] {
        for (name, number, started) in PARTS {
            cluster.set_binary(binary);
            await_progress(&cluster, &mut programs);
            processes::kill(cluster.daemon(name, number));
            start_missing(&cluster, started);
            suspend_supervisor(&cluster);
            println!("{started} by {}", binary.display());
            await_progress(&cluster, &mut programs);
            for other in [first, second] {
                cluster.set_binary(other);
                use_cluster(&cluster);
            }
        }
        cluster.set_binary(binary);
        programs.push(endless(&cluster));
    }
    for program in programs {
        let process = eventually("the program", || processes::descendants(program.pid()).first().copied());
        processes::kill(process);
        let outcome = program.wait();
        assert!(!outcome.stderr.contains("FAILED"), "wrong memory: {}", outcome.stderr);
    }
    cluster.assert_all_free();
    // `aquifer down` of the last release does not know it.
    supervisor(&cluster).into_iter().for_each(processes::kill);
}

/// The supervisor. The last release starts none.
fn supervisor(cluster: &Cluster) -> Option<u32> {
    let is_supervisor = |pid: &u32| processes::arguments(*pid).iter().any(|word| word == "supervisor");
    cluster.daemons().into_iter().find(is_supervisor)
}

/// Suspends the supervisor, so that it starts no part again.
fn suspend_supervisor(cluster: &Cluster) {
    supervisor(cluster).into_iter().for_each(|pid| processes::signal(pid, Signal::STOP));
}

mod long {
    use aquifer_tests_support::skip;

    use super::*;

    #[test]
    fn programs_live_through_an_upgrade_and_back() {
        let Some(last) = build::last_release() else {
            return skip("this clone has no history, so the last release cannot be built");
        };
        replace_parts(&last, build::binary());
        replace_parts(build::binary(), &last);
    }
}
