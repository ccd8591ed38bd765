//! Golden names: the metrics of a node and of an agent, with every value struck out.
//! A changed golden file needs a line in CHANGELOG: dashboards depend on names and labels.

use std::process::Stdio;

use aquifer_client::Session;
use aquifer_tests_e2e::network::Part;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::golden;
use aquifer_tests_support::openmetrics::ask;

/// The text, with `*` for each value, and for each value of a label but the bounds of histograms.
fn struck_out(place: &str) -> String {
    let answer = ask(place, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("it answers");
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
        // Rows that differ in values alone are one.
        if lines.last() != Some(&line) {
            lines.push(line);
        }
    }
    lines.join("\n")
}

#[test]
fn golden_figures_of_a_node_and_an_agent() {
    let cluster = Cluster::up_with(1, "64M", &["--fabric", "tcp"]);
    let [node_place, agent_place] = ["node", "agent"]
        .map(|part| format!("unix:{}", cluster.state().join(part).with_extension("metrics").display()));
    let words = ["node", "--id", "2", "--memory", "64M", "--listen", "127.0.0.1:0", "--metrics", &node_place];
    let node = Part::start_here(cluster.state(), &words);
    processes::kill(cluster.part("agent", None));
    let agent = Part::start_here(cluster.state(), &["agent", "--metrics", &agent_place]);

    // A run and a session, so that rows of both are there.
    let mut session = Session::open_at(cluster.agent_socket()).expect("the agent serves");
    let _extents = session.allocate_many(2 << 20, 20).expect("there is room");
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "64M", "--rounds", "1000000"];
    let mut run = cluster.run_command("16M", &program).stdout(Stdio::null()).spawn().expect("it starts");
    let mut agent_text = String::new();
    eventually("rows of the run, and operations at the node", || {
        agent_text = struck_out(&agent_place);
        let has_run = agent_text.contains("aquifer_agent_faults_total{");
        let has_served = struck_out(&node_place).contains("aquifer_node_served_bytes_total{");
        (has_run && has_served).then_some(())
    });
    let node_text = struck_out(&node_place);
    run.kill().and_then(|()| run.wait()).expect("it is ours");

    let mut golden = golden!("metrics-node");
    golden.lines(&node_text);
    golden.check();
    let mut golden = golden!("metrics-agent");
    golden.lines(&agent_text);
    golden.check();
    drop((session, agent, node));
}
