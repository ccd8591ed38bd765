//! Golden names: the metrics of a node and of an agent, without their values.
//! A changed golden file needs a line in CHANGELOG: dashboards depend on names and labels.
//!
//! Golden descriptors of `docs/formats/ipc.md`: which ones the keeper holds, in which order.
//! A changed golden file needs a changed document: the next agent may be of another build.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Stdio;

use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_client::Session;
use aquifer_ipc::{Frame, HeldKind, KeeperShare};
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::golden;
use aquifer_tests_support::openmetrics::send_request;

/// The metrics, with `*` for each value, and for each value of a label except the bounds of
/// histograms.
fn without_values(place: &str) -> String {
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text\r\n\r\n";
    let answer = send_request(place, request).expect("it answers");
    let mut lines = Vec::new();
    for line in answer.body.lines() {
        if line.starts_with('#') {
            lines.push(line.to_owned());
            continue;
        }
        let (name, _) = line.rsplit_once(' ').expect("a value follows");
        let mut struck = String::new();
        for (at, part) in name.split('"').enumerate() {
            let is_bound = struck.ends_with("le=\"");
            struck += if at % 2 == 1 && !is_bound { "*" } else { part };
            struck.push('"');
        }
        struck.pop();
        let line = struck + " *";
        // Rows that differ only in values become one.
        if lines.last() != Some(&line) {
            lines.push(line);
        }
    }
    lines.join("\n")
}

#[test]
fn golden_metrics_of_a_node_and_an_agent() {
    let cluster = Cluster::up_with(1, "64M", &["--fabric", "tcp"]);
    let [node_place, agent_place] = ["node", "agent"]
        .map(|part| format!("unix:{}", cluster.state().join(part).with_extension("metrics").display()));
    let words = ["node", "--id", "2", "--memory", "64M", "--listen", "127.0.0.1:0", "--metrics", &node_place];
    let node = RunningDaemon::start_here(cluster.state(), &words);
    processes::kill(cluster.daemon("agent", None));
    let agent = RunningDaemon::start_here(cluster.state(), &["agent", "--metrics", &agent_place]);

    // A run and a session, so that both have rows.
    let mut session = Session::open_at(cluster.agent_socket()).expect("the agent serves");
    let _extents = session.allocate_many(2 << 20, 20).expect("there is room");
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "64M", "--rounds", "1000000"];
    let mut run = cluster.run_command("16M", &program).stdout(Stdio::null()).spawn().expect("it starts");
    let mut agent_text = String::new();
    eventually("rows of the run, and operations at the node", || {
        agent_text = without_values(&agent_place);
        let has_run = ["aquifer_agent_faults_total{", "aquifer_agent_tenant_runs{"]
            .iter()
            .all(|row| agent_text.contains(row));
        let has_served = without_values(&node_place).contains("aquifer_node_served_bytes_total{");
        (has_run && has_served).then_some(())
    });
    let node_text = without_values(&node_place);
    run.kill().and_then(|()| run.wait()).expect("it is ours");

    let mut golden = golden!("metrics-node");
    golden.lines(&node_text);
    golden.check();
    let mut golden = golden!("metrics-agent");
    golden.lines(&agent_text);
    golden.check();
    drop((session, agent, node));
}

/// The kind of a descriptor, and the size of memory.
fn kind_of(fd: &OwnedFd) -> String {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("it is open");
    let link = link.to_str().expect("the kernel writes ASCII");
    match link {
        link if link.starts_with("/memfd:") => {
            let size = rustix::fs::fstat(fd).expect("it is open").st_size;
            format!("memory of {size} bytes")
        }
        link => ["socket", "userfaultfd", "pidfd", "/mem", "/pagemap", "/maps"]
            .into_iter()
            .find(|kind| link.contains(kind))
            .unwrap_or_else(|| panic!("{link} is of no known kind"))
            .to_owned(),
    }
}

/// Claims a share from the keeper as the next daemon would; one line for each record.
fn held(cluster: &Cluster, share: KeeperShare) -> Vec<String> {
    let socket = eventually("the keeper gives the share of a dead daemon", || {
        let socket = connect(&cluster.state().join("keeper.sock")).expect("the keeper listens");
        send_frame(&socket, &Frame::Claim(share), &[]).expect("the keeper listens");
        Some((receive_frame(&socket).ok()?, socket))
            .filter(|((first, _), _)| !matches!(first, Frame::Refused(_)))
    });
    let (mut next, socket) = socket;
    let mut lines = Vec::new();
    while let (Frame::Hold(put), fds) = &next {
        let kind = match put.kind {
            HeldKind::Host => "host",
            HeldKind::Run => "run",
            HeldKind::Program => "program",
            HeldKind::Orphan => "orphan",
            HeldKind::Session => "session",
            HeldKind::Node => "node",
            HeldKind::Heap => "heap",
            HeldKind::Segment => "segment",
            HeldKind::Partition => "partition",
        };
        // The shadow of the dead agent sends orphans at any time.
        if put.kind != HeldKind::Orphan {
            let fds: Vec<String> = fds.iter().map(kind_of).collect();
            lines.push(format!("{kind}: {}", fds.join(", ")));
        }
        next = receive_frame(&socket).expect("the keeper continues");
    }
    assert!(matches!(next.0, Frame::Sync), "{:?}", next.0);
    lines
}

#[test]
fn golden_descriptors_that_the_keeper_holds() {
    let cluster = Cluster::up_with(1, "64M", &["--keep-memory", "--mempool", "32M"]);
    let mut session = Session::open_at(cluster.agent_socket()).expect("the agent serves");
    let _extent = session.allocate(2 << 20).expect("there is room");
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "32M", "--rounds", "1000000"];
    let mut run = cluster.run_command("16M", &program).stdout(Stdio::null()).spawn().expect("it starts");
    eventually("the program is paged", || {
        let status = cluster.status();
        (status["agent"]["runs"][0]["faults"].as_u64()? > 0).then_some(())
    });
    processes::kill(cluster.daemon("node", Some(1)));
    processes::kill(cluster.daemon("agent", None));
    let mut lines = held(&cluster, KeeperShare::Agent);
    lines.extend(held(&cluster, KeeperShare::Node(1)));
    for pid in processes::descendants(run.id()) {
        processes::signal(pid, rustix::process::Signal::KILL);
    }
    run.kill().and_then(|()| run.wait()).expect("it is ours");

    let mut golden = golden!("kept-descriptors");
    golden.lines(&lines.join("\n"));
    golden.check();
}
